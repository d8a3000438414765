"""The wheel, as `make dist` builds it, works in an environment that has nothing else."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.processes import bare_environment

ROOT = pathlib.Path(__file__).parent.parent


def run(*command, cwd):
    """What a command prints, where nothing leads Python to the clone."""
    environment = {name: value for name, value in bare_environment().items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment_runs_the_demo(tmp_path):
    source = tmp_path / "source"  # without what was built in the clone
    source.mkdir()
    for name in ("shardfn", "layouts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ".", cwd=source)
    (wheel,) = tmp_path.glob("shardfn-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    printed = run(python, "-m", "shardfn", "demo", cwd=tmp_path)
    assert "Both sharded runs give the losses of their unsharded runs" in printed
    where = run(python, "-c", "import shardfn; print(shardfn.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path)), "the installed one, not the clone"
