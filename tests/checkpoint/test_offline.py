"""Copies without devices: into another layout, onto one device, as safetensors and back; and the command line."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardfn import checkpoint
from shardfn.checkpoint.catalogue import read_contents
from shardfn.checkpoint.safetensors_files import read_tensors
from shardfn.cli.main import main
from shardfn.errors import CheckpointError, CheckpointFileError
from shardfn.layoutfile import LayoutFileError
from tests.checkpoint.states import mesh, same, training
from tests.messages import refusal

LAYOUT = """
format = "shardfn-layout"
version = 2
others = "replicated"
[mesh]
data = {data}
model = 4
[arguments]
"params/w1" = ["data", "model"]
"*/mu/w1" = [["model", "data"], 1]
"""


@pytest.fixture(scope="module")
def state():
    return training()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("run")
    checkpoint.save(path, state, step=11)
    return path


@pytest.fixture
def layout(tmp_path):
    file = tmp_path / "layout.toml"
    file.write_text(LAYOUT.format(data=2))
    return file


def held(path):
    return {entry.path: entry for entry in read_contents(path / "11" / "state").entries}


def test_relayout(saved, state, layout, tmp_path):
    done = checkpoint.relayout(saved, tmp_path / "out", layout, memory="1MiB")
    assert (done.step, done.devices, done.arrays) == (11, 8, len(jax.tree.leaves(state)))
    entry = held(tmp_path / "out")["params/w1"]
    assert (entry.strategy, entry.spec) == ((2, 4), (("data",), ("model",)))
    back = checkpoint.restore(tmp_path / "out", like=state)
    same(back, state)
    back = checkpoint.restore(tmp_path / "out")
    assert back["params"]["w1"].sharding.spec == P("data", "model")
    assert back["opt"][0]["mu"]["w1"].sharding.shard_shape((64, 128)) == (8, 128)
    checkpoint.verify(tmp_path / "out")
    with pytest.raises(CheckpointError, match="step 11 exists already"):
        checkpoint.relayout(saved, tmp_path / "out", layout)
    checkpoint.save(tmp_path / "out", state, step=12)  # a run goes on where a copy was made
    assert checkpoint.steps(tmp_path / "out") == (11, 12)


def test_relayout_for_devices_that_are_nowhere(saved, state, layout, tmp_path):
    layout.write_text(LAYOUT.format(data='"left"'))
    with pytest.raises(CheckpointError, match="leaves the size of its axis `data` open"):
        checkpoint.relayout(saved, tmp_path / "out", layout)
    done = checkpoint.relayout(saved, tmp_path / "out", layout, devices=64, only="params/*", dtype=jnp.bfloat16)
    assert done.devices == 64
    entry = held(tmp_path / "out")["params/w1"]
    assert (entry.strategy, entry.dtype) == ((16, 4), "bfloat16")
    back = checkpoint.restore(tmp_path / "out", mesh(4, names=["model"]))
    same(back["params"]["w1"], state["params"]["w1"].astype(jnp.bfloat16))
    assert set(back) == {"params"}


def test_rules_of_a_function_of_the_state_leave_only_the_problem_of_the_mesh(tmp_path):
    checkpoint.save(tmp_path / "run", {"params": jnp.ones((8, 4)), "mu": jnp.ones((8, 4))}, step=1)
    file = tmp_path / "step.toml"
    file.write_text("""
format = "shardfn-layout"
version = 2
[mesh]
a = 4
[arguments]
"state/params" = ["a", 1]
"state/mu" = ["a", 1]
""")
    assert checkpoint.relayout(tmp_path / "run", tmp_path / "out", file).devices == 4
    with pytest.raises(LayoutFileError, match="has 4 devices, but there are 8") as found:
        checkpoint.relayout(tmp_path / "run", tmp_path / "eight", file, devices=8)
    assert len(found.value.problems) == 1


def test_merge(saved, state, tmp_path):
    checkpoint.merge(saved, tmp_path / "one")
    found = held(tmp_path / "one")
    assert {max(entry.strategy, default=1) for entry in found.values()} == {1}
    back = checkpoint.restore(tmp_path / "one", step=11)
    same(back["params"], state["params"])
    assert back["params"]["w1"].sharding.device_set == {jax.devices()[0]}


def test_a_large_array_in_small_memory(tmp_path):
    """Files no larger than a share of the bound, whatever the layout."""
    x = np.random.default_rng(0).normal(size=(1024, 1536)).astype("float32")
    checkpoint.save(tmp_path / "in", {"x": jax.device_put(x, NamedSharding(mesh(8), P(None, "a")))}, step=11)
    checkpoint.merge(tmp_path / "in", tmp_path / "out", memory="1MiB")
    entry = held(tmp_path / "out")["x"]
    assert np.prod(entry.chunks.file) * 4 <= (1 << 20) // 8
    same(checkpoint.restore(tmp_path / "out")["x"], x)


def test_safetensors_round_trip(saved, state, layout, tmp_path):
    (file,) = checkpoint.export_safetensors(
        saved, tmp_path / "model.safetensors", only="params/*", name_map={"params": "m"}
    )
    found = safetensors.numpy.load_file(file)
    assert set(found) == {"m.w1", "m.w2", "m.half", "m.none", "m.layers.0.bias", "m.layers.1.bias"}
    same(found["m.w1"], state["params"]["w1"])
    same(found["m.half"], state["params"]["half"])
    done = checkpoint.import_safetensors(file, tmp_path / "back", layout, name_map={"m": "params"})
    assert done.devices == 8
    same(checkpoint.restore(tmp_path / "back", like={"params": state["params"]}), {"params": state["params"]})
    assert checkpoint.restore(tmp_path / "back")["params"]["w1"].sharding.spec == P("data", "model")


@pytest.mark.parametrize("which", ["index", "folder"])
def test_safetensors_in_several_files(saved, state, tmp_path, which):
    files = checkpoint.export_safetensors(
        saved, tmp_path / "hub", only="params/*", file_bytes="1MiB", memory="1MiB", dtype="float16"
    )
    assert [file.name for file in files] == ["model.safetensors"]
    big = {"a": np.ones((512, 512), "float32"), "b": {"c": np.arange(300_000, dtype="float32"), "d": np.float32(3)}}
    checkpoint.save(tmp_path / "big", big)
    files = checkpoint.export_safetensors(tmp_path / "big", tmp_path / "hub2", file_bytes="1.2MiB", memory="1MiB")
    assert [file.name for file in files] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]  # fmt: skip
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == 512 * 512 * 4 + 300_000 * 4 + 4
    assert index["weight_map"]["b.c"] == files[1].name
    checkpoint.import_safetensors(
        files[-1] if which == "index" else tmp_path / "hub2", tmp_path / "back", memory="1MiB"
    )
    same(checkpoint.restore(tmp_path / "back"), big)


@pytest.mark.parametrize("sizes", [("1MiB", "1GiB"), ("1GiB", "1MiB")], ids=["to one file", "to several"])
def test_an_export_replaces_an_earlier_one_of_its_name(tmp_path, sizes):
    for step, size in enumerate(sizes):
        checkpoint.save(tmp_path / "run", {"a": jnp.full((512, 512), step), "b": jnp.full((512, 512), step)}, step=step)
        files = checkpoint.export_safetensors(tmp_path / "run", tmp_path / "out", file_bytes=size)
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    checkpoint.import_safetensors(tmp_path / "out", tmp_path / "back")
    assert checkpoint.restore(tmp_path / "back")["a"][0, 0] == 1


@pytest.mark.parametrize("step", [-1, 2.5, True, None])
def test_an_import_as_what_is_no_step_is_refused(tmp_path, step):
    safetensors.numpy.save_file({"a": np.ones(2, "float32")}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match=f"`step` is {step}"):
        checkpoint.import_safetensors(tmp_path / "one.safetensors", tmp_path / "run", step=step)
    checkpoint.import_safetensors(tmp_path / "one.safetensors", tmp_path / "run", step=np.int32(1))
    with pytest.raises(CheckpointError, match="there is no step True"):
        checkpoint.restore(tmp_path / "run", step=True)


def test_the_index_says_which_file_of_a_tensor_counts(tmp_path):
    for name, value, names in (("one", 1, "a"), ("two", 2, "ab")):
        tensors = {tensor: np.full(2, value, "float32") for tensor in names}
        safetensors.numpy.save_file(tensors, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for first in (1, 2):
        weights = {"a": ["one.safetensors", "two.safetensors"][first - 1], "b": "two.safetensors"}
        index.write_text(json.dumps({"weight_map": weights}))
        checkpoint.import_safetensors(index, tmp_path / "run", step=first)
        back = checkpoint.restore(tmp_path / "run", step=first)
        assert (back["a"][0], back["b"][0]) == (first, 2)


def test_files_of_others(tmp_path):
    """What the package of the format's makers writes."""
    rows = {
        "model.embed.weight": np.random.default_rng(0).normal(size=(300, 70)).astype(jnp.bfloat16),
        "n": np.array(3),
    }
    safetensors.numpy.save_file(rows, tmp_path / "x.safetensors")
    checkpoint.import_safetensors(tmp_path / "x.safetensors", tmp_path / "run")
    back = checkpoint.restore(tmp_path / "run")
    same(back["model"]["embed"]["weight"], rows["model.embed.weight"])
    assert back["n"] == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64", "bool"])
def test_dtypes_are_kept_and_slices_are_read(dtype, tmp_path):
    rows = {
        "first": np.ones((3,), "int8"),
        "w": np.arange(1, 49).reshape(6, 8).astype(jnp.dtype(dtype)),
        "one": np.asarray(1, jnp.dtype(dtype)),
    }
    safetensors.numpy.save_file(rows, tmp_path / "x.safetensors")
    found = read_tensors(tmp_path / "x.safetensors")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        name: (str(row.dtype), row.shape) for name, row in rows.items()
    }
    same(found["w"].read((slice(2, 5), slice(1, 3))), rows["w"][2:5, 1:3])
    same(found["one"].read(()), rows["one"])
    checkpoint.import_safetensors(tmp_path / "x.safetensors", tmp_path / "run")
    (file,) = checkpoint.export_safetensors(tmp_path / "run", tmp_path / "y.safetensors")
    again = read_tensors(file)
    for name, row in rows.items():
        same(again[name].read(tuple(slice(0, n) for n in row.shape)), row)
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode, "who may read other files may read this one"


def memory_mib(name):
    return next(int(row.split()[1]) >> 10 for row in open("/proc/self/status") if row.startswith(name))


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak of the memory is Linux's")
def test_a_file_larger_than_the_memory_is_written_a_piece_at_a_time(tmp_path):
    big = {"a": np.arange(1 << 24, dtype="float32").reshape(4096, 4096), "b": np.float32(3)}
    checkpoint.save(tmp_path / "big", big)
    checkpoint.export_safetensors(tmp_path / "big", tmp_path / "warm", only="b")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin = memory_mib("VmHWM")
    (file,) = checkpoint.export_safetensors(tmp_path / "big", tmp_path / "out", memory="16MiB")
    assert memory_mib("VmHWM") - begin < 32, "of 64"
    same(safetensors.numpy.load_file(file)["a"], big["a"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_file_that_changes_after_it_was_opened_is_named(tmp_path):
    good(tmp_path / "x.safetensors")
    found = read_tensors(tmp_path / "x.safetensors")["w"]
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointFileError, match=r"x.safetensors cannot be read(?s:.)*`w`"):
        found.read((slice(0, 2), slice(0, 2)))


def good(path):
    safetensors.numpy.save_file({"w": np.ones((64, 64), "float32"), "v": np.ones(3)}, path)
    return path.read_bytes()


def of_header(*rows):
    """A file whose header says what the rows say, with as many bytes as they need."""
    text = json.dumps(
        {name: {"dtype": dtype, "shape": shape, "data_offsets": span} for name, dtype, shape, span in rows}
    ).encode()
    return len(text).to_bytes(8, "little") + text + bytes(max(row[3][1] for row in rows))


BROKEN = {
    "empty": ("header too small", lambda data: b""),
    "truncated": ("file not fully covered", lambda data: data[:-5]),
    "longer": ("file not fully covered", lambda data: data + b"x"),
    "truncated in the header": ("invalid header length", lambda data: data[:20]),
    "a long header": ("header too large", lambda data: (10**12).to_bytes(8, "little") + data[8:]),
    "no JSON": ("expected value", lambda data: data[:8] + b"x" + data[9:]),
    "a dtype that there is not": ("unknown variant `F33`", lambda data: data.replace(b'"F32"', b'"F33"')),
    "another shape": ("invalid shape", lambda data: data.replace(b"[64,64]", b"[64,65]")),
    "a negative shape": ("invalid value", lambda data: data.replace(b"[64,64]", b"[-4,64]")),
    "a list": ("invalid type", lambda data: (8).to_bytes(8, "little") + b"[1, 2]  " + data[8:]),
    "tensors that overlap": ("invalid offset for tensor `b`",
                             lambda data: of_header(("a", "F32", [2], [0, 8]), ("b", "F32", [2], [4, 12]))),
    "a gap": ("invalid offset for tensor `b`",
              lambda data: of_header(("a", "F32", [2], [0, 8]), ("b", "F32", [2], [12, 20]))),
    "a dtype that NumPy has not": ("`a` has the dtype F4", lambda data: of_header(("a", "F4", [4], [0, 2]))),
}  # fmt: skip


@pytest.mark.parametrize(("why", "damage"), BROKEN.values(), ids=BROKEN)
def test_import_of_broken_safetensors_is_refused(tmp_path, why, damage):
    file = tmp_path / "x.safetensors"
    file.write_bytes(damage(good(file)))
    error = refusal(checkpoint.import_safetensors, file, tmp_path / "run")
    assert isinstance(error, CheckpointFileError) and why in error.problems[0].why and str(file) in str(error)
    assert not (tmp_path / "run").exists()


def test_bools_of_other_bytes(tmp_path):
    file = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"m": np.array([[True], [False]]), "one": np.array(True)}, file)
    checkpoint.import_safetensors(file, tmp_path / "run")
    assert checkpoint.restore(tmp_path / "run")["m"].tolist() == [[True], [False]]
    for at, name in ((-1, "one"), (-2, "m")):
        data = bytearray(file.read_bytes())
        data[at] = 2
        (tmp_path / "y.safetensors").write_bytes(data)
        with pytest.raises(CheckpointFileError, match=f"(?s)y.safetensors is damaged.*`{name}`.*one here is 2"):
            checkpoint.import_safetensors(tmp_path / "y.safetensors", tmp_path / "other")
        assert checkpoint.steps(tmp_path / "other") == ()


@pytest.mark.parametrize(
    "rows", [{"w": "../../etc/passwd"}, {"w": "x.safetensors", "u": "x.safetensors"}, {"w": 3}, []]
)
def test_broken_indices(tmp_path, rows):
    good(tmp_path / "x.safetensors")
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": rows}))
    with pytest.raises(CheckpointFileError):
        checkpoint.import_safetensors(file, tmp_path / "run")


def test_export_of_what_safetensors_has_not_is_refused(tmp_path):
    checkpoint.save(tmp_path / "run", {"a": {"b": jnp.ones(2)}, "a_b": jnp.ones(2), "i": jnp.ones(2, "int4")})
    error = refusal(lambda: checkpoint.export_safetensors(tmp_path / "run", tmp_path / "x", separator="_"))
    assert [problem.where for problem in error.problems] == ["a/b, a_b", "i: int4[2]"]


def test_a_bound_that_is_too_small_is_told_by_its_name(saved, tmp_path):
    for name in ("memory", "file_bytes"):
        with pytest.raises(CheckpointError, match=f'^`{name}` is 1000(?s:.*){name}="256MiB"'):
            checkpoint.export_safetensors(saved, tmp_path / "out", **{name: 1000})
    assert not (tmp_path / "out").exists()


def run(capsys, *arguments):
    status = main(["checkpoint", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_command_line(saved, state, layout, tmp_path, capsys):
    status, out, _ = run(capsys, "inspect", saved)
    assert status == 0
    assert "step 11\nsaved on 8 devices in 1 process, mesh a=2 x b=4\n" in out
    assert "params/w1               float32[64,128]   (1, 4)    32,768\n" in out
    status, out, _ = run(capsys, "verify", saved)
    assert status == 0 and "every checksum is right" in out
    assert run(capsys, "relayout", saved, tmp_path / "a", "--layout", layout, "--memory", "2MiB")[0] == 0
    assert run(capsys, "merge", tmp_path / "a", tmp_path / "b", "--only", "params/*", "--dtype", "bfloat16")[0] == 0
    status, out, _ = run(capsys, "export", tmp_path / "b", tmp_path / "x.safetensors", "--rename", "params=model")
    assert (status, out.strip()) == (0, str(tmp_path / "x.safetensors"))
    assert run(capsys, "import", tmp_path / "x.safetensors", tmp_path / "c", "--step", "4")[0] == 0
    back = checkpoint.restore(tmp_path / "c", step=4)
    same(back["model"]["w2"], state["params"]["w2"].astype(jnp.bfloat16))
    status, out, err = run(capsys, "relayout", saved, tmp_path / "d", "--layout", "nowhere/at-all")
    assert status == 2 and "there is no layout" in err
    status, out, err = run(capsys, "merge", saved, tmp_path / "e", "--rename", "x")
    assert status == 2 and "has no =" in err


def test_the_command_needs_no_devices(saved, layout, tmp_path):
    done = subprocess.run([sys.executable, "-m", "shardfn", "checkpoint", "relayout", str(saved), str(tmp_path / "out"),
                           "--layout", str(layout)], env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "NPROC": "8", "JAX_NUM_CPU_DEVICES": "1"}, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sharded for 8 devices" in done.stdout
