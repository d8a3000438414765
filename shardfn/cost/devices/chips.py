"""Kinds of devices with their figures, and how many of them a plan is for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardfn.errors import DeviceError, fail
from shardfn.files import atomic_file, read_bytes


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device: rates per second, sizes in bytes. A chip of your own needs the first seven fields.

    >>> mine = Chip("mine", "gpu", flops=400e12, memory_bytes_s=2e12, memory_bytes=64e9, link_bytes_s=200e9, latency_s=1e-5)
    >>> mine.pod(16).count, mine.rate("bf16") == mine.rate("f32")
    (16, True)
    """

    name: str
    platform: str
    """`cpu`, `gpu` or `tpu`: what programs are lowered for."""
    flops: float
    """Dense matrix products: bf16, of a CPU f32."""
    memory_bytes_s: float
    memory_bytes: float
    link_bytes_s: float
    """What one device sends over one link in one direction: to its switch, or to one neighbour of a torus."""
    latency_s: float
    """An empty collective; on a torus, one hop."""
    source: str = "given by the user"
    vector_flops: float = 0.0
    """Operations on single elements; 0 stands for `flops`."""
    dtype_flops: tuple[tuple[str, float], ...] = ()
    """Matrix products of other element types, as (`f32`, FLOP/s); types not named run at `flops`. `f32 high` and
    `f32 highest` are those of `jax.lax.Precision`, where they differ."""
    torus: int = 0
    """Dims of the torus that the devices form; 0 where they sit behind a switch."""
    ring: int = 1
    """A torus dim closes to a ring where its size is a multiple of this; in three dims only if all of them are."""
    node: int = 0
    """Devices behind one switch; 0 stands for all."""
    network_bytes_s: float = 0.0
    """What one device sends beyond its node."""
    fast_bytes: float = 0.0
    """Memory inside the chip that a compiler gives to arrays, in bytes: a TPU's VMEM, less what kernels use."""
    largest: tuple[int, ...] = ()
    """Dims of the largest torus that there is, in rising order; () where nothing bounds it."""
    sides: tuple[int, ...] = ()
    """Sizes that a torus dim may have, in rising order; () for any size. A count alone is not checked against it."""
    device_kinds: tuple[str, ...] = ()
    """How `device_kind` begins in JAX on such a device; the longest match counts."""
    aot_name: str = ""
    """What XLA's compiler calls it where it compiles without the device; empty where it cannot."""
    aot: tuple[tuple[str, Any], ...] = ()
    """What that compiler has to be told: of a GPU the fields of `GpuTargetConfigProto`, of a TPU libtpu's topology options."""
    split_k_coarseness: int = 2
    """How coarsely XLA splits small matmuls on a GPU (`cost.backends.gpu.split_k`); fitted on JAX 0.10.2."""
    collective_matmul_rows: float = 0.0
    """From how many rows of a matmul, for each byte of an element, XLA sends shards while it multiplies
    (`partition.collective_matmul`); 0 where it never does. Measured with libtpu 0.0.42."""
    launch_s: float = 0.0
    """What a kernel takes that computes nearly nothing; each kernel adds it to its time."""
    weight_gradient_efficiency: tuple[tuple[str, float], ...] = ()
    """By element type, the part of the matmul rate that a weight's gradient (`x.T @ dy`) reaches, as any matmul does that
    contracts the rows of both operands; types not named reach all of it."""

    kind_rates: tuple[tuple[str, float], ...] = ()
    """By kind of kernel (`cost.backends.gpu_library.KINDS`), the part that it reaches of the rate of memory, of elements or of
    matmuls. The time of a kind that is not named is not modelled."""

    def __post_init__(self) -> None:
        rates = ("flops", "memory_bytes_s", "memory_bytes", "link_bytes_s", "latency_s")
        bad = [name for name in rates if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name)))]
        if bad:
            fail(DeviceError, f"chip {self.name!r} needs a positive `{bad[0]}`",
                 where=f"Chip({self.name!r}, {bad[0]}={getattr(self, bad[0])!r})", why="times are divided by it",
                 fix="write what one device does per second, or its size in bytes")  # fmt: skip
        if self.platform not in ("cpu", "gpu", "tpu"):
            fail(DeviceError, f"chip {self.name!r} has no platform {self.platform!r}", where=f"Chip({self.name!r})",
                 why="a plan is lowered for one of cpu, gpu and tpu", fix='write platform="gpu"')  # fmt: skip
        if self.node and not self.network_bytes_s > 0:
            fail(DeviceError, f"chip {self.name!r} has nodes of {self.node}, but no network between them",
                 where=f"Chip({self.name!r}, node={self.node})", why="larger groups send beyond the node",
                 fix="give network_bytes_s, or leave node out")  # fmt: skip

    def rate(self, dtype: str, precision: str = "", is_weight_gradient: bool = False) -> float:
        """The matmul rate for an element type.

        Args:
          dtype: the element type, named as in MLIR (`f32`, `bf16`).
          precision: `high` or `highest` of `jax.lax.Precision`; empty for the default.
          is_weight_gradient: whether the matmul contracts the rows of both operands.

        Returns:
          FLOP/s of one device.
        """
        rates = dict(self.dtype_flops)
        named = f"{dtype} {precision}" if f"{dtype} {precision}" in rates else dtype
        return rates.get(named, self.flops) * (
            dict(self.weight_gradient_efficiency).get(named, 1.0) if is_weight_gradient else 1.0
        )

    def kind_rate(self, kind: str) -> float | None:
        """The part of the chip's rate that a kind of kernel reaches; None where nobody measured it.

        >>> CHIPS["h100"].kind_rate("memory"), CHIPS["cpu"].kind_rate("sort")
        (1.0, None)
        """
        return dict(self.kind_rates).get(kind, 1.0 if kind in _LIKE_OTHERS else None)

    def pod(self, size: int | str) -> Hardware:
        """A number of these chips, as a target to plan for.

        Args:
          size: the number of devices, or the dimensions of a torus, such as "4x8".

        Returns:
          The hardware, for `device=`.

        Raises:
          DeviceError: the size is neither, or a shape that no pod of these chips has.

        >>> CHIPS["tpu-v5e"].pod("4x8").topology
        (4, 8)
        """
        text = str(size).strip().lower()
        dims = tuple(map(int, text.split("x"))) if _SHAPE.fullmatch(text) else ()
        count = math.prod(dims)
        if not dims or not 1 <= count < 2**31:
            fail(DeviceError, f"{size!r} is no size of a pod", where=f"{self.name}: pod({size!r})",
                 why="a size is a count or the dims of a torus", fix='write 32, or "4x8"')  # fmt: skip
        is_shape = len(dims) > 1
        if self.torus and not is_shape:
            dims = most_cubic(count, self.torus)
        self._check_torus(dims, f"{self.name}:{text}", is_shape)
        if is_shape:
            self._check_sides(dims, f"{self.name}:{text}")
        platform = "cuda" if self.platform == "gpu" else self.platform
        return Hardware(self, platform, count, name=f"{self.name}:{text}", topology=dims if self.torus else ())

    def _check_torus(self, dims: tuple[int, ...], where: str, is_shape: bool) -> None:
        """Raise a DeviceError for dims that no torus of these chips has; `is_shape`: the user wrote them, not a count."""

        def text(shape: tuple[int, ...]) -> str:
            return "x".join(map(str, shape))

        def fits(shape: tuple[int, ...]) -> bool:
            padded = (1,) * (len(self.largest) - len(shape)) + tuple(sorted(shape))
            return not self.largest or all(n <= most for n, most in zip(padded, self.largest, strict=True))

        if not self.torus and len(dims) > 1:
            nodes = f"in nodes of {self.node}, which a count fills one after the other" if self.node else "all alike"
            fail(DeviceError, f"{self.name} forms no torus that could have the shape {text(dims)}", where=where,
                 why=f"a shape describes a torus of TPUs; these devices are {nodes}",
                 fix=f'write "{self.name}:{math.prod(dims)}"; the mesh is searched, or follows your strategies')  # fmt: skip
        if self.torus and len(dims) > self.torus:
            near = most_cubic(math.prod(dims), self.torus)
            fail(DeviceError, f"{self.name} forms a torus of {self.torus} dims, not {len(dims)}", where=where,
                 why=f"each chip has links along {self.torus} dims",
                 fix=f'write "{self.name}:{text(near if fits(near) else self.largest)}"')  # fmt: skip
        largest = math.prod(self.largest)
        if not fits(dims) and (count := math.prod(dims)) <= largest and not is_shape:
            near = {
                math.prod(shape)
                for shape in itertools.combinations_with_replacement(self.sides, self.torus)
                if fits(shape)
            }
            sizes = max(n for n in near if n <= count), min(n for n in near if n >= count)
            fail(DeviceError, f"no slice of {self.name} has {count} chips", where=where,
                 why=f"it would be {text(dims)}, and the largest is {text(self.largest)}",
                 fix="write " + " or ".join(f'"{self.name}:{n}"' for n in sizes))  # fmt: skip
        if not fits(dims):
            fail(DeviceError, f"no torus of {self.name} has the shape {text(dims)}", where=where,
                 why=f"the largest is {text(self.largest)}: {largest:,} chips",
                 fix=f'write "{self.name}:{text(self.largest)}" or less, or name another chip')  # fmt: skip

    def _check_sides(self, dims: tuple[int, ...], where: str) -> None:
        """Raise a DeviceError for a shape with a dim that no slice has, with the next smaller and larger shape."""
        if not self.sides or set(dims) <= set(self.sides):
            return
        below = (max(s for s in self.sides if s <= n) for n in dims)
        above = (min(s for s in self.sides if s >= n) for n in dims)
        near = (f'"{self.name}:{"x".join(map(str, shape))}"' for shape in (below, above))
        fail(DeviceError, f"no slice of {self.name} has the shape {'x'.join(map(str, dims))}", where=where,
             why=f"each dim of one is {', '.join(map(str, self.sides[:-1]))} or {self.sides[-1]}",
             fix=f"write {' or '.join(near)}")  # fmt: skip


_SHAPE = re.compile(r"\d+(x\d+)*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a plan runs on. `devices` is None for a target that is only planned for; `mesh` where the user gave one.

    Equal hardware may be other devices of the same kind.
    """

    chip: Chip
    platform: str
    """As JAX lowers for it: cpu, cuda, rocm, tpu."""
    count: int
    devices: tuple[Any, ...] | None = dataclasses.field(default=None, compare=False)
    mesh: Mesh | AbstractMesh | None = dataclasses.field(default=None, compare=False)
    name: str = ""
    topology: tuple[int, ...] = ()
    """Dims of the torus that the devices fill, the last one fastest; () where there is none."""

    @property
    def is_here(self) -> bool:
        """Whether programs can run on it now."""
        return self.devices is not None

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes whose devices it has, in rising order; none for a target that is only planned for."""
        return tuple(sorted({device.process_index for device in self.devices or ()}))


def most_cubic(count: int, dims: int) -> tuple[int, ...]:
    """The torus of `count` devices whose largest dim is least, dims in rising order, as Cloud TPU slices are cut.

    >>> most_cubic(32, 2), most_cubic(128, 3), most_cubic(7, 2)
    ((4, 8), (4, 4, 8), (1, 7))
    """
    if dims == 1:
        return (count,)
    least = itertools.takewhile(lambda n: n**dims <= count, itertools.count(1))
    found = [(n, *most_cubic(count // n, dims - 1)) for n in least if not count % n]
    return min(found, key=lambda shape: (max(shape), tuple(reversed(shape))))


MAX_FILE_BYTES = 1 << 20
"""More than any file of a chip has."""


def load_chip(path: str | os.PathLike[str]) -> Chip:
    """A chip from the file that `python -m shardfn calibrate --save` writes, or one written by hand.

    Raises:
      DeviceError: the file is missing, or does not hold a chip.
    """
    where = os.fspath(path)
    try:
        data = json.loads(read_bytes(path, MAX_FILE_BYTES))["chip"]
        data |= {name: tuple(data.get(name, ())) for name in ("largest", "sides", "device_kinds")}
        data["aot"] = tuple((str(name), value) for name, value in data.get("aot", ()))
        for name in ("dtype_flops", "weight_gradient_efficiency", "kind_rates"):
            data[name] = tuple((str(dtype), float(rate)) for dtype, rate in data.get(name, ()))
        return Chip(**data)
    except DeviceError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail(DeviceError, "no chip can be read from the file", where=where, why=f"{type(error).__name__}: {error}",
             fix="delete the file; python -m shardfn calibrate --save writes it again")  # fmt: skip


def save_chip(chip: Chip, path: str | os.PathLike[str]) -> None:
    """Write a chip where `load_chip` finds it, all of it or nothing. Missing directories are made."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as file:
        file.write(f"{json.dumps({'chip': dataclasses.asdict(chip)}, indent=1)}\n".encode())


def _nvidia(name: str, source: str, *, flops: float, f32: float, f64: float, vector: float, memory_s: float, memory: float,
            link: float, network: float, kinds: tuple[str, ...], aot: dict[str, Any], fp8: bool = False,
            split_k_coarseness: int = 2, f32_gradients: float = 1.0) -> Chip:  # fmt: skip
    # XLA runs f32 products as TF32, unless the highest precision is asked for; int8 and fp8 at twice the rate of bf16.
    twice = ("i8", "ui8", *(("f8E4M3FN", "f8E5M2") if fp8 else ()))
    dtypes = (("f32", f32), ("f32 highest", vector), ("f64", f64), *((dtype, 2 * flops) for dtype in twice))
    return Chip(name, "gpu", flops, memory_s, memory, link, 7e-6, source, vector, dtypes, node=8,
                network_bytes_s=network, device_kinds=kinds, aot_name=name, aot=tuple((_GPU_LIMITS | aot).items()),
                split_k_coarseness=split_k_coarseness, launch_s=1.5e-6,
                weight_gradient_efficiency=(("f32", f32_gradients),), kind_rates=_H100_KINDS)  # fmt: skip


_LIKE_OTHERS = frozenset(("memory", "matmul", "gather", "scatter", "reduction", "2D convolution"))
"""Kinds that have the chip's rate of memory, elements or matmuls where no other was measured."""

_H100_KINDS = (
    ("sort", 0.545),
    ("bitonic sort", 5.0),
    ("fft", 0.78),
    ("cholesky", 0.344),
    ("triangular solve of a vector", 0.151),
    ("reduction", 0.0239),
    ("2D convolution", 0.496),
    ("3D convolution", 0.223),
    ("3D weight gradient", 0.0826),
)
"""Measured on one H100 (JAX 0.11.2, 27 November 2026) in the steps of `benchmarks/kinds.py`, over the datasheet's rates; the
other GPUs have the same. Sorts of 512 x 262,144 pairs, FFTs of 384^3, one matrix of 8,192 rows, 3D convolutions of 32 channels;
of 2D ones what a U-Net in `bf16` takes beyond the bytes of its other kernels."""


# XLA's description of a GPU (`GpuTargetConfigProto`): it plans tiles, fusions and schedules by these.
_GPU_LIMITS = {
    "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
    "threads_per_core_limit": 2048, "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535, "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
}  # fmt: skip
_AMPERE = {
    "core_count": 108, "fpus_per_core": 64, "shared_memory_per_core": 167936, "shared_memory_per_block_optin": 166912,
    "clock_rate_ghz": 1.41, "l2_cache_size": 40 * 2**20, "cuda_compute_capability": "{ major: 8 minor: 0 }",
}  # fmt: skip
_HOPPER = {
    "core_count": 132, "fpus_per_core": 128, "shared_memory_per_core": 233472, "shared_memory_per_block_optin": 232448,
    "clock_rate_ghz": 1.98, "l2_cache_size": 50 * 2**20, "cuda_compute_capability": "{ major: 9 minor: 0 }",
}  # fmt: skip
_BLACKWELL = {
    "core_count": 148, "fpus_per_core": 128, "shared_memory_per_core": 233472, "shared_memory_per_block_optin": 232448,
    "clock_rate_ghz": 1.965, "l2_cache_size": 132644864, "cuda_compute_capability": "{ major: 10 minor: 0 }",
}  # fmt: skip


def _tpu(name: str, source: str, *, flops: float, int8: float, vector: float, memory_s: float, memory: float, link: float,
         largest: tuple[int, ...], fast: float, matmul_rows: float, kinds: tuple[str, ...],
         aot: tuple[tuple[str, Any], ...] = ()) -> Chip:  # fmt: skip
    # f32 products run as one bf16 pass by default, so `flops` holds for them too; as 3 and 6 at higher precision.
    dtypes = (("i8", int8), ("f32 high", flops / 3), ("f32 highest", flops / 6))
    return Chip(name, "tpu", flops, memory_s, memory, link, 1e-6, source, vector, dtypes, len(largest),
                ring=4 if len(largest) == 3 else 16, largest=largest, fast_bytes=fast,
                sides=(1, 2, *range(4, largest[-1] + 1, 4)) if len(largest) == 3 else (1, 2, 4, 8, 16),
                device_kinds=kinds, aot_name=name.removeprefix("tpu-"), aot=aot, collective_matmul_rows=matmul_rows)  # fmt: skip


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("cpu", "cpu", flops=3e10, memory_bytes_s=1.5e9, memory_bytes=4e9, link_bytes_s=1.3e9, latency_s=7e-5,
             source="8 virtual devices on 2 cores, measured once", vector_flops=7.5e9, dtype_flops=(("f64", 1.5e10),)),
        _nvidia("a100", "NVIDIA A100 80GB SXM datasheet", flops=312e12, f32=156e12, f64=19.5e12, vector=19.5e12,
                memory_s=2.039e12, memory=80e9, link=300e9, network=25e9, kinds=("NVIDIA A100",), split_k_coarseness=8,
                aot=_AMPERE | {"memory_bandwidth": 2039 * 10**9, "device_memory_size": 80 * 2**30}),
        _nvidia("a100-40gb", "NVIDIA A100 40GB SXM datasheet", flops=312e12, f32=156e12, f64=19.5e12, vector=19.5e12,
                memory_s=1.555e12, memory=40e9, link=300e9, network=25e9, kinds=("NVIDIA A100-SXM4-40GB",), split_k_coarseness=8,
                aot=_AMPERE | {"memory_bandwidth": 1555 * 10**9, "device_memory_size": 42331013120}),
        _nvidia("h100", "NVIDIA H100 SXM datasheet", flops=989e12, f32=494e12, f64=67e12, vector=67e12,
                f32_gradients=0.6, memory_s=3.35e12, memory=80e9, link=450e9, network=50e9, fp8=True, kinds=("NVIDIA H100",),
                aot=_HOPPER | {"memory_bandwidth": 3352 * 10**9, "device_memory_size": 79 * 2**30}),
        _nvidia("h200", "NVIDIA H200 SXM datasheet", flops=989e12, f32=494e12, f64=67e12, vector=67e12,
                f32_gradients=0.6, memory_s=4.8e12, memory=141e9, link=450e9, network=50e9, fp8=True, kinds=("NVIDIA H200",),
                aot=_HOPPER | {"memory_bandwidth": 4800 * 10**9, "device_memory_size": 140 * 2**30}),
        _nvidia("b200", "NVIDIA Blackwell architecture technical brief, HGX B200", flops=2250e12, f32=1100e12, f64=40e12,
                vector=80e12, memory_s=8e12, memory=180e9, link=900e9, network=50e9, fp8=True, kinds=("NVIDIA B200",),
                aot=_BLACKWELL | {"memory_bandwidth": 7672 * 10**9, "device_memory_size": 191514411008}),
        _tpu("tpu-v4", "Google Cloud TPU v4 system page", flops=275e12, int8=275e12, vector=4.3e12,
             memory_s=1.228e12, memory=32e9, link=50e9, largest=(16, 16, 16), fast=128.0 * 2**20, matmul_rows=3058.0,
             kinds=("TPU v4",), aot=(("chip_config_name", "megacore"),)),
        _tpu("tpu-v5e", "Google Cloud TPU v5e system page", flops=197e12, int8=393e12, vector=6.1e12,
             memory_s=0.819e12, memory=16e9, link=50e9, largest=(16, 16), fast=112.0 * 2**20, matmul_rows=2111.0,
             kinds=("TPU v5 lite", "TPU v5e")),
        _tpu("tpu-v5p", "Google Cloud TPU v5p system page", flops=459e12, int8=918e12, vector=14.3e12,
             memory_s=2.765e12, memory=95e9, link=100e9, largest=(16, 20, 28), fast=48.0 * 2**20, matmul_rows=2111.0,
             kinds=("TPU v5", "TPU v5p")),
        _tpu("tpu-v6e", "Google Cloud TPU v6e system page", flops=918e12, int8=1836e12, vector=7.2e12,
             memory_s=1.638e12, memory=32e9, link=100e9, largest=(16, 16), fast=96.0 * 2**20, matmul_rows=4920.0,
             kinds=("TPU v6 lite", "TPU v6e")),
    )
}  # fmt: skip
"""Presets. The CPU's figures are those of `python -m shardfn calibrate` on a small virtual machine. Matrix rates, memory and
its rate are the makers' figures for dense arithmetic.

GPUs: the NVLink figure of the datasheet is both directions together, half of it is one; a network card for each GPU
(200 Gb/s in a DGX A100, 400 Gb/s in a DGX H100, H200 or B200), 8 GPUs behind one NVSwitch; about 7 µs for an empty NCCL
collective; 1.5 µs for a kernel's launch, measured on one H100, where TF32 matmuls that contract the rows of both operands ran
at 0.58 to 0.65 of the rate of others.
TPUs: pods of 16x16x16 (v4), 16x16 (v5e, v6e) and 16x20x28 chips (v5p); interconnect of a chip in both
directions, over 2 and over its 4 (v5e, v6e) or 6 (v4, v5p) ports; about 1 µs a hop (Austin et al., "How to Scale Your
Model", 2025); a slice of v5e or v6e is of dims that are powers of two, one of v4 or v5p of 1, 2 or whole cubes of 4x4x4 (Cloud
TPU's lists of types); vector units: 1,024 lanes of four units (v4: two) in each
core, at the clock that the matrix rate implies. Memory inside the chip: what libtpu 0.0.42 gave to whole arrays in programs
that could use more: on v5e 112 MiB of the vector memory's 128, on v4 all 128 MiB of its common memory; on v6e and v5p up to 95
and 44 MiB, taken here for 96 and 48, which is what they have (`jax.experimental.pallas.tpu.get_tpu_info`) less 32 and 16.
"""
