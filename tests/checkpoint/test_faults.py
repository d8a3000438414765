"""Processes that are killed, folders that others write in, disks that are full."""

import os
import pathlib
import resource
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from shardfn import checkpoint, layoutfile, shard
from shardfn.checkpoint import arrays
from shardfn.errors import CheckpointError, CheckpointFileError
from tests.checkpoint.states import files, same
from tests.messages import refusal

ROOT = pathlib.Path(__file__).parents[2]


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


KILLED_IN_RETENTION = """
import os, sys
import numpy as np
from shardfn import checkpoint

path, most = sys.argv[1], int(sys.argv[2])
for step in (1, 2):
    checkpoint.save(path, {"w": np.arange(9), "step": step}, step=step)
removed = 0

def hook(event, args):
    global removed
    removed += event in ("os.remove", "os.rmdir")
    if removed > most:
        os._exit(9)

sys.addaudithook(hook)
checkpoint.save(path, {"w": np.arange(9), "step": 3}, step=3, keep=1)
"""


@pytest.mark.parametrize("files_removed", [4, 15, 18, 30])
def test_a_step_that_retention_removed_in_part_is_no_step(tmp_path, files_removed):
    done = subprocess.run([sys.executable, "-c", KILLED_IN_RETENTION, str(tmp_path), str(files_removed)])
    assert done.returncode == 9
    for step in checkpoint.steps(tmp_path):
        checkpoint.verify(tmp_path, step)
    assert checkpoint.restore(tmp_path)["step"] >= 2
    checkpoint.save(tmp_path, {"w": np.arange(9), "step": 4}, step=4, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


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
    for name in ("3.orbax-checkpoint-tmp/state", "3.part.17/state", "2024/plots", "77"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "7").write_text("")
    assert checkpoint.steps(tmp_path) == (1,)
    checkpoint.verify(tmp_path)


@pytest.mark.parametrize("inside", ["plots", ""])
def test_a_folder_that_is_no_step_is_refused_before_it_could_be_deleted(tmp_path, inside):
    checkpoint.save(tmp_path, {"x": np.zeros(4)}, step=1, keep=1)
    plots = tmp_path / "20261128" / inside
    plots.mkdir(parents=True)
    for step in (2, 20261129):
        with pytest.raises(CheckpointError, match="20261128 is no checkpoint"):
            checkpoint.save(tmp_path, {"x": np.zeros(4)}, step=step, keep=1)
    assert plots.exists() and checkpoint.steps(tmp_path) == (1,)


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
