"""Processes that are killed, files that are cut short or changed, disks that are full."""

import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardfn import checkpoint, layoutfile, shard
from shardfn.checkpoint import arrays
from shardfn.errors import CheckpointError, CheckpointFileError
from tests.checkpoint.states import mesh, plain, same
from tests.messages import refusal

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small():
    rng = np.random.default_rng(0)
    on = NamedSharding(mesh(2, 4), P("a", "b"))
    return {
        "w": jax.device_put(rng.normal(size=(64, 512)).astype("float32"), on),
        "zeros": jax.device_put(jnp.zeros((16, 16)), on),
        "n": 3,
    }


def files(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def largest(folder):
    """The file with the chunks of the arrays of a step."""
    return max(files(folder), key=lambda file: file.stat().st_size)


def hit(run, path, damage, like):
    """What happens to a restore when a file is changed: the error, or None where all is as it was."""
    data = path.read_bytes()
    damage(path, data)
    try:
        return None, plain(checkpoint.restore(run, like=like))
    except (CheckpointFileError, CheckpointError) as error:
        return error, None
    finally:
        path.write_bytes(data)


@pytest.mark.slow
def test_a_changed_bit_is_found_or_without_effect(tmp_path, small):
    checkpoint.save(tmp_path, small)
    whole = plain(checkpoint.restore(tmp_path, like=small))
    draw = random.Random(0)
    found = 0
    for file in files(tmp_path / "0" / "state"):
        size = file.stat().st_size
        for at in sorted(draw.sample(range(size), min(size, 12))):
            bit = 1 << draw.randrange(8)

            def flip(path, data, at=at, bit=bit):
                path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])

            error, back = hit(tmp_path, file, flip, small)
            if error is None:
                assert file != largest(tmp_path), f"byte {at} of {file}"
                jax.tree.map(np.testing.assert_array_equal, back, whole)
            else:
                found += 1
                assert str(tmp_path / "0") in str(error) or "`like`" in str(error), f"byte {at} of {file}: {error}"
    assert found > 30


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d/*", "ocdbt.process_0/d/*", "_METADATA"])
@pytest.mark.parametrize("part", [None, 0, 0.5, 0.99])
def test_a_file_cut_short_is_told(tmp_path, small, name, part):
    checkpoint.save(tmp_path, small)
    file = max((tmp_path / "0" / "state").glob(name), key=lambda file: file.stat().st_size)

    def cut(path, data):
        path.unlink() if part is None else path.write_bytes(data[: int(len(data) * part)])

    error, _ = hit(tmp_path, file, cut, small)
    assert isinstance(error, CheckpointFileError)
    assert ("`w`" if name.startswith("ocdbt") else str(tmp_path / "0" / "state")) in str(error)
    jax.tree.map(np.testing.assert_array_equal, plain(checkpoint.restore(tmp_path)), plain(small))


def holed(file):
    """Change a byte in every 100 of a file."""
    data = np.fromfile(file, np.uint8)
    data[50::100] ^= 1
    data.tofile(file)


def test_all_damage_is_told_at_once(tmp_path, small):
    small = {**small, "v": small["w"] + 1}
    checkpoint.save(tmp_path, small)
    holed(largest(tmp_path))
    for call in (checkpoint.restore, checkpoint.verify):
        with pytest.raises(CheckpointFileError) as error:
            call(tmp_path)
        assert {"`w` is damaged", "`v` is damaged"} <= {
            problem.what.partition(" in ")[0] for problem in error.value.problems
        }
    assert "float32[64, 512]" in str(error.value)
    with pytest.raises(CheckpointFileError, match="is damaged"):
        checkpoint.merge(tmp_path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists() or checkpoint.steps(tmp_path / "merged") == ()
    with pytest.raises(CheckpointFileError, match="is damaged"):
        checkpoint.export_safetensors(tmp_path, tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*.safetensors*"))


def test_only_what_is_read_is_checked(tmp_path, small):
    checkpoint.save(tmp_path, small)
    holed(largest(tmp_path))
    assert checkpoint.restore(tmp_path, only="n")["n"] == 3
    with pytest.raises(CheckpointFileError):
        checkpoint.verify(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"tree_metadata": {"a": 3}}', "\0" * 9, '"x"'])
def test_a_description_of_nonsense(tmp_path, small, text):
    checkpoint.save(tmp_path, small)
    (tmp_path / "0" / "state" / "_METADATA").write_text(text)
    (tmp_path / "0" / "state" / "SHA256SUMS").unlink()
    (tmp_path / "0" / "_CHECKPOINT_METADATA").unlink()  # as another program leaves it
    with pytest.raises(CheckpointFileError, match=r"_METADATA cannot be read"):
        checkpoint.restore(tmp_path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: b"0" + text[1:] if text[:1] != b"0" else b"1" + text[1:], "is damaged"),
        (lambda text: text.replace(b"_METADATA", b"_METADATb"), "is damaged"),
        (lambda text: b"\xff\xfe" + text[2:], "is damaged"),
        (lambda text: text[:100], "is damaged"),
        (lambda text: text[:-1], "is damaged"),
        (lambda text: b"".join(text.splitlines(True)[:2]), "is damaged"),
        (lambda text: b"", "is damaged"),
        (lambda text: None, "is missing"),
    ],
)
def test_damaged_checksums_blame_no_other_file(tmp_path, small, damage, told):
    checkpoint.save(tmp_path, small)
    file = tmp_path / "0" / "state" / "SHA256SUMS"
    text = damage(file.read_bytes())
    file.unlink()
    if text is not None:
        file.write_bytes(text)
    for call in (checkpoint.restore, checkpoint.verify):
        with pytest.raises(CheckpointFileError, match=f"SHA256SUMS {told}") as error:
            call(tmp_path)
        assert len(error.value.problems) == 1


def test_sha256sum_reads_our_checksums(tmp_path, small):
    checkpoint.save(tmp_path, small)
    if program := shutil.which("sha256sum"):
        subprocess.run([program, "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "0" / "state", check=True)


@pytest.fixture
def small_files():
    """No file of this process may grow beyond 100 kB: what a full disk is to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_there(tmp_path, small_files):
    big = {"w": np.random.default_rng(0).normal(size=(512, 512)), "b": np.ones(3)}
    checkpoint.save(tmp_path, big, step=1, keep=1)
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)
    small_files()
    with pytest.raises(CheckpointFileError, match="is full") as error:
        checkpoint.save(tmp_path, {**big, "b": np.zeros(3)}, step=2, keep=1)
    saving = checkpoint.save(tmp_path, {**big, "b": np.zeros(3)}, step=3, keep=1, background=True)
    with pytest.raises(CheckpointFileError, match="is full"):
        saving.wait()
    with pytest.raises(CheckpointFileError, match="is full"):
        checkpoint.merge(tmp_path, tmp_path / "merged")
    with pytest.raises(CheckpointFileError, match="is full"):
        checkpoint.export_safetensors(tmp_path, tmp_path / "out")
    resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert isinstance(error.value, OSError)
    assert checkpoint.steps(tmp_path) == (1,)
    assert checkpoint.restore(tmp_path)["b"][0] == 1
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ["1", *(["merged"] if "merged" in left else []), *(["out"] if "out" in left else [])] or set(
        left
    ) <= {"1", "merged", "out"}
    assert not files(tmp_path / "merged") and not files(tmp_path / "out")
    checkpoint.save(tmp_path, big, step=4, keep=1)
    assert checkpoint.steps(tmp_path) == (4,), "there is room again"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFileError, match="cannot be created"):
        checkpoint.save(tmp_path / "file" / "run", {"x": jnp.ones(2)})


KILLED = """
import os, random, signal, sys, time
import numpy as np
import orbax.checkpoint, tensorstore
from shardfn import checkpoint
from shardfn.checkpoint import orbax_store

path, seed, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
leaves, rows = 12, 96

def state(step):
    return {f"w{i}": np.full((rows, 257), step * 1000 + i, "int32") for i in range(leaves)} | {"step": step}

def train(ready):
    step = max(checkpoint.steps(path), default=0)
    checkpoint.save(path, state(step + 1), step=step + 1, keep=2)
    os.write(ready, b"x")
    while True:
        step += 1
        checkpoint.save(path, state(step + 1), step=step + 1, keep=2, background=True)

for kill in range(kills):
    here, ready = os.pipe()
    child = os.fork()  # nothing of JAX runs in this process: its threads begin in the children
    if not child:
        try:
            train(ready)
        finally:
            os._exit(1)
    os.close(ready)
    assert os.read(here, 1) == b"x", "the child failed"
    os.close(here)
    time.sleep(draw.uniform(0, 0.5))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    checker = os.fork()
    if not checker:
        code = 1
        try:
            known = checkpoint.steps(path)
            assert known, "no checkpoint is left"
            for step in known[-2:]:
                back = checkpoint.restore(path, step=step)
                for i in range(leaves):
                    assert (back[f"w{i}"] == step * 1000 + i).all(), (step, i)
                assert back["step"] == step
            names = sorted(os.listdir(path))
            print("killed", kill, "whole", known, "left", [n for n in names if not n.isdecimal()], flush=True)
            code = 0
        finally:
            if code:
                import traceback
                traceback.print_exc()
            os._exit(code)
    _, status = os.waitpid(checker, 0)
    assert status == 0, f"kill {kill}"
print("done")
"""


def killed(path, seed, kills):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "8",
                   "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(seed), str(kills)], env=environment,
                          capture_output=True, text=True, timeout=900)  # fmt: skip
    assert done.returncode == 0 and done.stdout.rstrip().endswith("done"), done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_while_saving(tmp_path):
    told = killed(tmp_path, 1, 4)
    assert told.count("killed") == 4


@pytest.mark.slow
def test_killed_at_many_moments(tmp_path):
    told = killed(tmp_path, 2, 40)
    assert told.count("killed") == 40
    assert "orbax-checkpoint-tmp" in told, "some kills fell into a save"


def test_a_step_half_removed_is_not_taken(tmp_path):
    """What a kill leaves while an old step is removed: a folder without its description, or without some files."""
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, {"x": np.full(4, step)}, step=step)
    shutil.rmtree(tmp_path / "1" / "state" / "d")
    with pytest.raises(CheckpointFileError, match="`x` is"):
        checkpoint.restore(tmp_path, step=1)
    (tmp_path / "2" / "state" / "_METADATA").unlink()
    assert checkpoint.steps(tmp_path) == (1, 3)


LOST = {
    "description": lambda step: (step / "state" / "_METADATA").unlink(),
    "state": lambda step: shutil.rmtree(step / "state"),
    "all": lambda step: [shutil.rmtree(x) if x.is_dir() else x.unlink() for x in step.iterdir()],
}


@pytest.mark.parametrize("lost", LOST)
def test_a_damaged_last_step_is_never_passed_over(tmp_path, lost):
    for step in (1, 2):
        checkpoint.save(tmp_path, {"x": np.full(4, step)}, step=step)
    LOST[lost](tmp_path / "2")
    assert checkpoint.steps(tmp_path) == (1, 2)
    for call in (checkpoint.restore, checkpoint.verify, checkpoint.inspect, checkpoint.reads):
        with pytest.raises(CheckpointFileError, match=r"2/state/_METADATA is missing"):
            call(tmp_path)
    assert checkpoint.restore(tmp_path, step=1)["x"][0] == 1
    assert checkpoint.save(tmp_path, {"x": np.full(4, 3)}).step == 3
    assert checkpoint.restore(tmp_path)["x"][0] == 3


def test_what_is_no_step_is_passed_over(tmp_path):
    checkpoint.save(tmp_path, {"x": np.zeros(4)}, step=1)
    for name in ("3.orbax-checkpoint-tmp/state", "3.part.17/state", "2024/plots"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "7").write_text("")
    assert checkpoint.steps(tmp_path) == (1,)
    checkpoint.verify(tmp_path)


def test_a_folder_that_is_no_step_is_refused_before_it_could_be_deleted(tmp_path):
    checkpoint.save(tmp_path, {"x": np.zeros(4)}, step=1, keep=1)
    plots = tmp_path / "20261128" / "plots"
    plots.mkdir(parents=True)
    for step in (2, 20261129):
        with pytest.raises(CheckpointError, match="20261128 is no checkpoint"):
            checkpoint.save(tmp_path, {"x": np.zeros(4)}, step=step, keep=1)
    assert plots.exists() and checkpoint.steps(tmp_path) == (1,)


def without_a_row(folder):
    file = folder / "_METADATA"
    data = json.loads(file.read_text())
    del data["tree_metadata"]["('w',)"]
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without_a_row, "_METADATA is not the file that was saved"),
        (lambda folder: shutil.rmtree(folder / "array_metadatas"), "array_metadatas/process_0 is missing"),
        (lambda folder: (folder / "_sharding").unlink(), "_sharding is missing"),
    ],
)
def test_a_description_that_is_not_the_one_saved_is_told(tmp_path, damage, told):
    checkpoint.save(tmp_path, {"w": jnp.arange(4.0), "key": jax.random.key(1)})
    damage(tmp_path / "0" / "state")
    for call in (checkpoint.restore, checkpoint.verify, checkpoint.inspect):
        with pytest.raises(CheckpointFileError, match=told):
            call(tmp_path)


def test_an_earlier_step_does_not_delete_later_ones(tmp_path):
    for step in (5, 10):
        checkpoint.save(tmp_path, {"x": jnp.ones(2)}, step=step)
    with pytest.raises(CheckpointError, match="step 6 is before the last one, 10"):
        checkpoint.save(tmp_path, {"x": jnp.ones(2)}, step=6, keep=1)
    assert checkpoint.steps(tmp_path) == (5, 10)


def test_remains_of_a_step_are_not_written_over(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, {"x": jnp.ones(2)}, step=step)
    (tmp_path / "1" / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="there are remains of a step 1"):
        checkpoint.save(tmp_path, {"x": jnp.ones(2)}, step=1)


def test_a_folder_by_another_name_is_the_same(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    saving = checkpoint.save(tmp_path / "run", {"x": jnp.ones(1 << 20)}, background=True)
    assert checkpoint.save(tmp_path / "link", {"x": jnp.ones(2)}).step == 1
    saving.wait()
    assert checkpoint.steps(tmp_path / "link") == (0, 1)


@pytest.mark.parametrize("name", ["run[1]", "a\\b", "[x]/run"], ids=["brackets", "backslash", "brackets above"])
def test_a_path_where_orbax_loses_what_it_writes_is_refused_before_a_step_is_deleted(tmp_path, name):
    state = {"x": jnp.arange(4.0)}
    checkpoint.save(tmp_path / "run", state, step=1)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run").rename(tmp_path / name)
    for call in (
        lambda: checkpoint.save(tmp_path / name, state, step=2, keep=1),
        lambda: checkpoint.merge(tmp_path / name, tmp_path / name),
    ):
        assert "rename the folder" in refusal(call).problems[0].fix
    assert checkpoint.steps(tmp_path / name) == (1,)
    if "\\" in name:
        assert "takes its backslash for a /" in refusal(checkpoint.restore, tmp_path / name).problems[0].why
    else:
        same(checkpoint.restore(tmp_path / name), state)


@pytest.mark.parametrize("name", ["a[b", "a]b", "what? *", "#%'\"~{}", "ünï"])
def test_other_names_of_folders_are_no_problem(tmp_path, name):
    checkpoint.save(tmp_path / name, {"x": jnp.arange(4.0)})
    same(checkpoint.restore(tmp_path / name), {"x": jnp.arange(4.0)})


@pytest.mark.parametrize("step", [None, 0])
def test_a_file_in_the_place_of_a_step_is_kept(tmp_path, step):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "0").write_text("notes")
    checkpoint.save(tmp_path / "other", {"x": jnp.ones(2)}, step=0)
    for call in (
        lambda: checkpoint.save(tmp_path / "run", {"x": jnp.ones(2)}, step=step),
        lambda: checkpoint.merge(tmp_path / "other", tmp_path / "run"),
    ):
        assert refusal(call).problems[0].what == f"{tmp_path / 'run' / '0'} is a file"
    assert (tmp_path / "run" / "0").read_text() == "notes"


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError])
def test_a_failed_write_says_what_failed_where(tmp_path, kind):
    with pytest.raises(CheckpointFileError) as error, arrays.write_errors(tmp_path):
        raise kind(13, "it failed", f"{tmp_path}/a [1]")
    assert error.value.problems[0].why == f"{kind.__name__}: it failed: '{tmp_path}/a [1]'"


SAVES = """
import sys
import numpy as np
from shardfn import checkpoint
saving = checkpoint.save(sys.argv[1], {"x": np.arange(4)}, step=1, background=True)
print("begun", flush=True)
sys.stdin.readline()
saving.wait()
"""


def test_a_folder_in_which_another_process_saves_is_refused_until_it_has_saved(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path / "run")], env=environment, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:  # fmt: skip
        assert other.stdout.readline() == "begun\n"
        for step in (1, 2):
            error = refusal(lambda: checkpoint.save(tmp_path / "run", {"x": np.zeros(4)}, step=step, keep=1))  # noqa: B023
            assert isinstance(error, CheckpointError)
        other.communicate("\n")
    assert other.returncode == 0
    checkpoint.save(tmp_path / "run", {"x": np.zeros(4)}, step=2)
    assert checkpoint.steps(tmp_path / "run") == (1, 2)
    same(checkpoint.restore(tmp_path / "run", step=1), {"x": np.arange(4)})


def test_a_step_that_another_process_saved_meanwhile_is_told_as_such(tmp_path, monkeypatch):
    plan = shard(jnp.tanh, device="cpu:1").plan(jnp.ones(4))

    def read_layout(layout):
        monkeypatch.undo()
        checkpoint.save(tmp_path, {"x": jnp.ones(4)}, step=1)  # as another process, after the steps were looked for
        return layoutfile.read_layout(layout)

    monkeypatch.setattr(layoutfile, "read_layout", read_layout)
    error = refusal(lambda: checkpoint.save(tmp_path, {"x": jnp.zeros(4)}, plan, step=1))
    assert error.problems[0].why == "another process saved it meanwhile"
    assert checkpoint.save(tmp_path, {"x": jnp.zeros(4)}).step == 2
    same(checkpoint.restore(tmp_path, step=1), {"x": jnp.ones(4)})


FAILS = """
import resource, sys
import numpy as np
from shardfn import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
checkpoint.save(sys.argv[1], {"w": np.random.default_rng(0).normal(size=(512, 512))}, background=True)
print("ends", flush=True)
"""


def test_a_program_whose_last_save_fails_ends_with_an_error(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FAILS, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "ends" in done.stdout and "is full" in done.stderr, done.stderr
    assert checkpoint.steps(tmp_path) == ()
