"""What all benchmarks share: the devices they run on, the tables they print, and the JSON that `results.py` reads."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import multiprocessing
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Row = Mapping[str, Any]
ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("shardfn", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
"""Their versions are recorded wherever they are installed."""
LOAD = os.getloadavg()[0]
"""Programs that wanted a core when this one began."""


def environment(backend: str, devices: int) -> dict[str, str]:
    """The variables that give JAX `devices` virtual devices if the backend is `cpu`; for a process that has not started JAX.

    >>> environment("cpu", 2)["XLA_FLAGS"].split()[-1], environment("gpu", 2)["JAX_PLATFORMS"]
    ('--xla_force_host_platform_device_count=2', 'cuda,cpu')
    """
    count = "--xla_force_host_platform_device_count"
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(count)]
    threads = {"NPROC": str(max(32, 2 * devices))}  # JAX before 0.12 can deadlock with fewer than two for each device
    if backend == "cpu":
        return {**threads, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*flags, f"{count}={devices}"])}
    return {**threads, "JAX_PLATFORMS": "cuda,cpu" if backend == "gpu" else f"{backend},cpu"}


def start(backend: str, devices: int) -> None:
    """Let JAX, which may be imported but has computed nothing, start with this backend and so many virtual CPU devices."""
    import jax

    wanted = environment(backend, devices)
    os.environ.update(wanted)
    jax.config.update("jax_platforms", wanted["JAX_PLATFORMS"])


def parse(
    parser: argparse.ArgumentParser, devices: int | None = None, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Add `--json`, and for a benchmark that runs on `devices` devices `--platform`; read the options and start JAX there."""
    parser.add_argument("--json", metavar="OUT", help="a file for the tables, with command, date, versions and machine")
    if devices is not None:
        parser.add_argument("--platform", default="cpu", help="cpu (virtual devices), or what JAX has here: gpu, tpu")
    options = parser.parse_args(argv)
    if devices is not None:
        start(options.platform, devices)
    return options


def in_own_process(function: Callable[..., T], *args: Any, backend: str, devices: int) -> T:
    """The result of a function of a module, called in a new process with so many devices: JAX fixes them at its start."""
    with multiprocessing.get_context("spawn").Pool(1, start, (backend, devices)) as pool:
        return pool.apply(function, args)


# ---- tables


def text(value: Any) -> str:
    """A cell: floats with three significant digits.

    >>> text(1234567), text(1234.5), text(0.01234), text(None), text(True), text("FSDP")
    ('1,234,567', '1,234', '0.0123', '-', 'yes', 'FSDP')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def is_number(value: Any) -> bool:
    """Whether a cell is written at the right of its column."""
    return value is None or isinstance(value, int | float)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Rows of the same columns as aligned text.

    >>> print("\\n".join(lines([{"step": "mlp", "ms": 12.5}, {"step": "gpt2", "ms": 112.0}])))
    step   ms
    mlp  12.5
    gpt2  112
    """
    cells = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(is_number(row[name]) for row in rows) for name in rows[0]]
    for row in cells:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        yield "  ".join(aligned).rstrip()


def show(rows: Sequence[Row], title: str = "") -> None:
    """Print rows, below a title."""
    print("\n".join([title] * bool(title) + list(lines(rows)) + [""]), flush=True)


# ---- files


def machine() -> dict[str, Any]:
    """The processor, its cores that this process may use, how many programs wanted them before, and JAX's device."""
    import jax

    return {"processor": _processor(), "cores": cores(), "load": round(LOAD, 1), "device": jax.devices()[0].device_kind}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    named = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return named[0] if named else platform.processor() or platform.machine()


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Versions of Python, of `PACKAGES` and of further ones, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *packages):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command(argv: Sequence[str]) -> str:
    """What was typed, from the repository's root, without `--json`.

    >>> command([str(ROOT / "benchmarks" / "train.py"), "--json", "out.json", "--steps", "5"])
    'python benchmarks/train.py --steps 5'
    """
    script, *rest = argv
    kept = [
        word for i, word in enumerate(rest) if not word.startswith("--json") and (i == 0 or rest[i - 1] != "--json")
    ]
    path = pathlib.Path(script).resolve()
    return shlex.join(["python", str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name, *kept])


def save(path: str | os.PathLike[str] | None, tables: Mapping[str, Sequence[Row]], *,
         notes: Sequence[str] = (), packages: Sequence[str] = ()) -> None:  # fmt: skip
    """Write the tables of a benchmark as JSON, with command, date, versions and machine; nothing if `path` is None.

    Args:
      path: The file; numbers that are not finite become null there.
      tables: The rows of each table by its name.
      notes: What a reader of the tables must know of this run.
      packages: Packages beyond `PACKAGES` whose versions matter.
    """
    if path is None:
        return
    written = {"command": command(sys.argv), "date": datetime.date.today().isoformat(), "versions": versions(packages),
               "machine": machine(), "notes": list(notes), "tables": _plain(tables)}  # fmt: skip
    write(path, written)


def write(path: str | os.PathLike[str], found: Mapping[str, Any]) -> None:
    """Write what `save` does: JSON."""
    pathlib.Path(path).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Data as JSON has it: no tuples, no NumPy numbers, no infinities."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.item() if hasattr(value, "item") else value
