"""Names under which clouds rent accelerators, read as a chip and a number of chips.

Google Cloud's TPU types (`v5litepod-16`, `v5p-512`) count chips or TensorCores, whichever the generation is sold by; its
machine types (`a3-highgpu-8g`, `ct5lp-hightpu-4t`) and those of AWS and Azure are one machine with its accelerators.
"""

from __future__ import annotations

import re

CHIP_NAMES = {
    "v4": "tpu-v4", "tpu-v4-podslice": "tpu-v4",
    "v5e": "tpu-v5e", "v5litepod": "tpu-v5e", "v5lite": "tpu-v5e", "tpu-v5litepod": "tpu-v5e", "tpu-v5lite": "tpu-v5e",
    "tpu-v5-lite-podslice": "tpu-v5e", "tpu-v5-lite-device": "tpu-v5e",
    "v5p": "tpu-v5p", "tpu-v5p-slice": "tpu-v5p",
    "v6e": "tpu-v6e", "tpu-v6e-slice": "tpu-v6e",
    "nvidia-tesla-a100": "a100-40gb", "nvidia-a100-80gb": "a100", "nvidia-b200": "b200",
    "a100-80gb": "a100", "h100-80gb": "h100", "h200-141gb": "h200",
    "nvidia-h100-80gb": "h100", "nvidia-h100-mega-80gb": "h100", "nvidia-h200-141gb": "h200",
}  # fmt: skip
"""Other names of a chip: Google's of TPU types, and those of accelerators in GKE."""

CORES = {"tpu-v4": 2, "tpu-v5p": 2}
"""TensorCores of a chip, by which Google Cloud counts `v4-N` and `v5p-N`; other types count chips."""

_SLICE = re.compile(r"(?P<name>v4|v5litepod|v5e|v5p|v6e)-(?P<count>\d+)", re.ASCII)

_MACHINES = tuple(
    (re.compile(pattern, re.ASCII), chip, count)
    for pattern, chip, count in (
        (r"a4-highgpu-(\d+)g", "b200", 0),
        (r"a3-(?:high|mega|edge)gpu-(\d+)g", "h100", 0),
        (r"a3-ultragpu-(\d+)g", "h200", 0),
        (r"a2-ultragpu-(\d+)g", "a100", 0),
        (r"a2-highgpu-(\d+)g", "a100-40gb", 0),
        (r"ct4p-hightpu-(\d+)t", "tpu-v4", 0),
        (r"ct5lp?-hightpu-(\d+)t", "tpu-v5e", 0),
        (r"ct5p-hightpu-(\d+)t", "tpu-v5p", 0),
        (r"ct6e-standard-(\d+)t", "tpu-v6e", 0),
        (r"p4d\.24xlarge", "a100-40gb", 8),
        (r"p4de\.24xlarge", "a100", 8),
        (r"p5\.48xlarge", "h100", 8),
        (r"p5\.4xlarge", "h100", 1),
        (r"p5en?\.48xlarge", "h200", 8),
        (r"p6-b200\.48xlarge", "b200", 8),
        (r"standard_nd96asr_v4", "a100-40gb", 8),
        (r"standard_nd96amsr_a100_v4", "a100", 8),
        (r"standard_nd96isr_h100_v5", "h100", 8),
        (r"standard_nd96isr_h200_v5", "h200", 8),
    )
)
"""Machine types of Google Cloud, AWS and Azure: the chip, and how many there are if the name does not say it."""

_WITHOUT_FIGURES = (
    (re.compile(r"a4x-.*|p6e-gb200\..*|standard_nd128isr_.*gb200_v6|(nvidia-)?gb200"), "NVIDIA GB200"),
    (re.compile(r"(nvidia-)?gb300"), "NVIDIA GB300"),
    (re.compile(r"(amd-)?mi\d{3}[a-z]*"), "AMD Instinct"),
    (re.compile(r"p6-b300\..*|(nvidia-)?b300"), "NVIDIA B300"),
    (re.compile(r"a2-megagpu-16g"), "16 NVIDIA A100 behind one switch"),
    (re.compile(r"g2-standard-.*|g6\..*|(nvidia-)?l4"), "NVIDIA L4"),
    (re.compile(r"g6e\..*|(nvidia-)?l40s"), "NVIDIA L40S"),
    (re.compile(r"g4-standard-.*"), "NVIDIA RTX PRO 6000"),
    (re.compile(r"p3(dn)?\..*|(nvidia-tesla-)?v100|standard_nd40rs_v2"), "NVIDIA V100"),
    (re.compile(r"trn\d.*\..*"), "AWS Trainium"),
    (re.compile(r"ct7.*|tpu-?v?7x?(-.*)?|v7x?(-\d+)?"), "TPU7x"),
)
"""Names of what there are no figures for, in `chips.CHIPS`."""


def without_figures(name: str) -> str:
    """The accelerators of a cloud's name that no chip has the figures of; empty for any other name.

    >>> without_figures("a4x-highgpu-4g:2"), without_figures("a3-highgpu-8g")
    ('NVIDIA GB200', '')
    """
    key = name.strip().lower().partition(":")[0]
    return next((what for pattern, what in _WITHOUT_FIGURES if pattern.fullmatch(key)), "")


def target_of(name: str) -> str | None:
    """The target that a cloud's name means; None for any other name.

    >>> target_of("v5litepod-16"), target_of("v5p-512"), target_of("a3-highgpu-8g"), target_of("v5e:4x4"), target_of("gpu")
    ('tpu-v5e:16', 'tpu-v5p:256', 'h100:8', 'tpu-v5e:4x4', None)
    """
    key = name.strip().lower()
    chip, colon, size = key.partition(":")
    if colon and chip in CHIP_NAMES:
        return f"{CHIP_NAMES[chip]}:{size}"
    if found := _SLICE.fullmatch(key):
        chip = CHIP_NAMES[found["name"]]
        count, rest = divmod(int(found["count"]), CORES.get(chip, 1))
        return None if rest else f"{chip}:{count}"
    for pattern, chip, count in _MACHINES:
        if found := pattern.fullmatch(key):
            return f"{chip}:{count or found[1]}"
    return None


def machines(name: str, count: str) -> str | None:
    """The target of several machines of one type; None where `name` is none. Several slices are no torus.

    >>> machines("a3-highgpu-8g", "4"), machines("h100", "4")
    ('h100:32', None)
    """
    one = target_of(name)
    if one is None or _SLICE.fullmatch(name.strip().lower()) or not re.fullmatch(r"\d+", count, re.ASCII):
        return None
    chip, _, size = one.partition(":")
    return f"{chip}:{int(size) * int(count)}"
