"""What do checkpoints cost? Three tables: bytes that a restore reads, memory that a copy needs, time beside Orbax by hand.

- restore: a checkpoint saved under one layout, restored under others; bytes read from files against bytes that the
  devices then hold, both packed.
- relayout: a checkpoint larger than the bound, copied in a process of its own; how much its memory grows.
- time: save and restore of the same state under the same layout, ours and Orbax's `CheckpointManager`, in turn, A B A B.

Run: python benchmarks/checkpoint.py [--mib 256] [--memory-mib 128] [--rounds 7] [--only restore relayout time]
     [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import harness
from shardfn import checkpoint
from shardfn.checkpoint import arrays

LAYOUTS = {
    "rows (8, 1)": ((8,), ("a",), ("a", None)),
    "columns (1, 8)": ((8,), ("a",), (None, "a")),
    "both (2, 4)": ((2, 4), ("a", "b"), ("a", "b")),
    "both (4, 2)": ((4, 2), ("a", "b"), ("a", "b")),
    "replicated, on one": ((1,), ("a",), (None, None)),
}


def model(mib: int, layers: int = 4) -> dict[str, np.ndarray]:
    """A transformer's shapes with random weights, about `mib` MiB of float32."""
    width = max(64, int((mib * (1 << 20) / 4 / layers / 12) ** 0.5) // 64 * 64)
    rng = np.random.default_rng(0)
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"layers/{i}/{name}": rng.standard_normal(shape, "float32")
        for i in range(layers)
        for name, shape in shapes.items()
    } | {f"layers/{i}/bias": rng.standard_normal(4 * width, "float32") for i in range(layers)}


def laid(name: str, shape: tuple[int, ...]) -> NamedSharding:
    sizes, names, spec = LAYOUTS[name]
    count = int(np.prod(sizes))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), names)
    return NamedSharding(mesh, P(*spec) if len(shape) == 2 else P())


def put(state: dict[str, np.ndarray], name: str) -> dict[str, jax.Array]:
    return {path: jax.device_put(value, laid(name, value.shape)) for path, value in state.items()}


def restore_table(mib: int, folder: pathlib.Path) -> list[dict]:
    state = model(mib)
    rows = []
    for saved in LAYOUTS:
        path = folder / f"restore-{len(rows)}"
        checkpoint.save(path, put(state, saved))
        packed = checkpoint.inspect(path).disk_bytes / sum(x.nbytes for x in state.values())
        for target in LAYOUTS:
            like = {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=laid(target, x.shape)) for p, x in state.items()}
            told = checkpoint.reads(path, like=like)
            before = arrays.bytes_read()
            checkpoint.restore(path, like=like)
            read = arrays.bytes_read() - before
            # A process reads a replicated array once for all of its devices.
            total = sum(x.nbytes for x in state.values())
            held = min(total, sum(told.needed.values()))
            rows.append({
                "saved": saved, "restored": target, "MiB needed a device": max(told.needed.values()) / 2**20,
                "MiB of chunks a device": max(told.read.values()) / 2**20,
                "device ratio": max(told.read[d] / told.needed[d] for d in told.needed),
                "MiB from files": read / 2**20, "file ratio": read / (held * packed),
            })  # fmt: skip
        shutil.rmtree(path)
    return rows


CHILD = """
import sys
import tensorstore  # before the first peak
from shardfn import checkpoint
import jax; jax.local_devices(backend="cpu")

def peak():
    return next(int(row.split()[1]) * 1024 for row in open("/proc/self/status") if row.startswith("VmHWM"))

source, target, layout, memory, kind = sys.argv[1:]
before = peak()
if kind == "relayout":
    checkpoint.relayout(source, target, layout, memory=int(memory))
elif kind == "merge":
    checkpoint.merge(source, target, memory=int(memory))
elif kind == "export":
    checkpoint.export_safetensors(source, target, memory=int(memory))
else:
    checkpoint.import_safetensors(source, target, layout, memory=int(memory))
print(before, peak())
"""


def relayout_table(mib: int, memory_mib: int, folder: pathlib.Path) -> list[dict]:
    state = model(mib)
    state["embedding"] = np.random.default_rng(1).standard_normal(
        (mib << 14, 8), "float32"
    )  # one array of half as much
    total = sum(x.nbytes for x in state.values())
    source = folder / "source"
    checkpoint.save(source, put(state, "rows (8, 1)"))
    del state
    layout = folder / "layout.toml"
    layout.write_text('format = "shardfn-layout"\nversion = 2\nothers = "replicated"\n[mesh]\nx = 4\ny = 2\n[arguments]\n'
                      '"layers/*/[quod]*" = ["y", "x"]\n"embedding" = ["x", "y"]\n')  # fmt: skip
    rows = []
    for kind in ("relayout", "merge", "export", "import"):
        begin = time.perf_counter()
        origin = folder / "export" if kind == "import" else source
        done = subprocess.run([sys.executable, "-c", CHILD, str(origin), str(folder / kind), str(layout),
                               str(memory_mib << 20), kind], capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr)
        before, peak = map(int, done.stdout.split())
        rows.append({
            "copy": kind, "checkpoint MiB": total / 2**20, "bound MiB": memory_mib, "at start MiB": before / 2**20,
            "peak MiB": peak / 2**20, "growth MiB": (peak - before) / 2**20, "of bound": (peak - before) / (memory_mib << 20),
            "s": time.perf_counter() - begin,
        })  # fmt: skip
    return rows


def time_table(mib: int, rounds: int, folder: pathlib.Path) -> list[dict]:
    import orbax.checkpoint as ocp

    state = put(model(mib), "both (2, 4)")
    like = {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for p, x in state.items()}

    def ours_save(path):
        checkpoint.save(path, state, step=0)

    def ours_restore(path):
        return checkpoint.restore(path, like=like)

    def theirs_save(path):
        with ocp.CheckpointManager(path) as manager:
            manager.save(0, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()

    def theirs_restore(path):
        with ocp.CheckpointManager(path) as manager:
            return manager.restore(0, args=ocp.args.StandardRestore(like))

    times: dict[str, list[float]] = {name: [] for name in ("save", "save by hand", "restore", "restore by hand")}
    disk = {}
    for i in range(rounds + 1):
        pairs = [("", ours_save, ours_restore), (" by hand", theirs_save, theirs_restore)]
        for name, save, restore in pairs if i % 2 == 0 else pairs[::-1]:
            path = folder / f"time{name.replace(' ', '-')}"
            begin = time.perf_counter()
            save(path)
            middle = time.perf_counter()
            jax.block_until_ready(restore(path))
            end = time.perf_counter()
            if i:  # the first round warms up
                times["save" + name].append(middle - begin)
                times["restore" + name].append(end - middle)
            disk[name] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            shutil.rmtree(path)
    rows = []
    for what in ("save", "restore"):
        ours, hand = times[what], times[what + " by hand"]
        rows.append({
            "what": what, "MiB": sum(x.nbytes for x in state.values()) / 2**20, "ours s": statistics.median(ours),
            "by hand s": statistics.median(hand), "ratio": statistics.median(a / b for a, b in zip(ours, hand, strict=True)),
            "ours MiB on disk": disk[""] / 2**20, "by hand": disk[" by hand"] / 2**20,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    parser.add_argument("--memory-mib", type=int, default=128, help="the bound of the copies")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only", nargs="+", choices=("restore", "relayout", "time"), default=("restore", "relayout", "time")
    )
    parser.add_argument("--folder", help="where to write; a temporary folder if left out")
    options = harness.parse(parser, devices=8)
    found = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        if "restore" in options.only:
            found["restore"] = restore_table(min(options.mib, 128), folder)
            harness.show(found["restore"], "restore: what is read against what is needed")
        if "relayout" in options.only:
            found["relayout"] = relayout_table(4 * options.mib, options.memory_mib, folder)
            harness.show(found["relayout"], "copies: memory")
        if "time" in options.only:
            found["time"] = time_table(options.mib, options.rounds, folder)
            harness.show(found["time"], "time beside Orbax by hand: medians")
    harness.save(options.json, found, packages=["orbax-checkpoint"])


if __name__ == "__main__":
    main()
