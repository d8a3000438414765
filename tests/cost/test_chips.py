"""A chip is one row of `cost.devices.chips`: each row is complete, and the compilers know it."""

import dataclasses

import pytest

from shardfn.cost.devices.chips import CHIPS, Chip
from shardfn.cost.devices.hardware import chip_of

# What a row of each platform needs beyond the first seven fields, which are checked when it is made.
NEEDED = {
    "cpu": ("source", "vector_flops"),
    "gpu": ("source", "vector_flops", "dtype_flops", "node", "network_bytes_s", "device_kinds", "aot_name", "aot"),
    "tpu": (
        "source",
        "vector_flops",
        "dtype_flops",
        "torus",
        "ring",
        "fast_bytes",
        "largest",
        "sides",
        "collective_matmul_rows",
        "device_kinds",
        "aot_name",
    ),
}


def incomplete(chip: Chip) -> list[str]:
    """Fields that a row leaves at their default."""
    default = {field.name: field.default for field in dataclasses.fields(Chip)}
    return [name for name in NEEDED[chip.platform] if getattr(chip, name) == default[name]]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_chip_row_is_complete(chip):
    assert incomplete(chip) == []


def test_incomplete_sees_missing_fields():
    bare = Chip("mine", "cpu", 1e12, 1e12, 1e9, 1e9, 1e-6)
    assert incomplete(bare) == ["source", "vector_flops"]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_chip_of_device_kind_finds_the_row(chip):
    for kind in chip.device_kinds:
        assert chip_of(chip.platform, kind) is chip
