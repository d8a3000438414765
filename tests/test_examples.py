"""Every script and notebook of examples/ runs to its end; each holds its own result against the unsharded one."""

import os
import pathlib
import runpy
import subprocess
import sys

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("[0-9]*.py"))
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))


def bare() -> dict[str, str]:
    """The environment without what says how many devices there are: the examples say it themselves."""
    keep = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS", "JAX_PLATFORMS")}
    return keep | {"PYTHONPATH": str(ROOT)}


def flags() -> str:
    """How XLA compiles here, without how many devices there are."""
    return " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)


def test_all_are_here():
    assert [p.name[:2] for p in SCRIPTS] == [f"{i:02}" for i in range(1, len(SCRIPTS) + 1)]
    assert len(SCRIPTS) >= 8
    assert {p.stem for p in NOTEBOOKS} >= {"pynative_style", "from_mindspore", "which_layout"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path, as_user_code, capsys):
    runpy.run_path(str(path), run_name="__main__")  # in this process: it saves starting JAX again
    assert capsys.readouterr().out


def test_a_script_runs_alone():
    done = subprocess.run([sys.executable, str(SCRIPTS[0])], env=bare(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "notebooks are stored without their outputs"
    for name in ("NPROC", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", flags())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    nbclient.NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [output for output in shown if "text/html" in output.get("data", {})]
    assert pages, "a report is shown as HTML"
