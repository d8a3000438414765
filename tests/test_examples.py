"""Every script and notebook of examples/ runs to its end; each holds its own result against the unsharded one.

Notebooks are stored with their outputs: `SHARDFN_UPDATE_GOLDEN=1` stores them anew, with `-m ""` the slow ones too.
"""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile

import jax
import nbclient
import nbformat
import pytest

from tests.processes import bare_environment

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("[0-9]*.py"))
OUTPUTS = ROOT / "examples" / "outputs"
"""What the scripts print, shown on the site."""
VARYING = {"17_gpt"}
"""It draws its losses and writes a text, which are other ones on another machine."""
IS_THE_RELEASE_SHOWN = jax.__version__.startswith("0.10.")
"""Whether stored outputs are those of this JAX: another release has other collectives."""
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
SLOW = {
    "02_mlp": "docs/tutorials/first-sharded-function.md",
    "03_parameter_plan": "docs/how-to/tensor-parallel.md, tests/test_api.py",
    "04_training": "docs/tutorials/train-on-eight-devices.md",
    "05_modules": "docs/how-to/equinox.md, tests/frontend/test_callee.py",
    "10_layout_files": "docs/how-to/write-a-layout-file.md, docs/how-to/keep-a-plan.md",
    "14_pipeline": "docs/how-to/pipeline.md, tests/train/test_pipeline.py",
    "15_train_step": "tests/train/test_step.py",
    "16_serve": "docs/how-to/serve.md",
    "17_gpt": "docs/tutorials/train-on-eight-devices.md trains, docs/how-to/save-and-restore.md stops and goes on",
    "18_vit": "docs/how-to/large-images.md, tests/train/test_step.py",
    "19_wide_and_deep": "docs/how-to/embedding-tables.md, tests/train/test_table_step.py",
    "20_mixture_of_experts": "docs/how-to/mixture-of-experts.md, tests/experts",
    "21_cluster_run": "docs/how-to/several-hosts.md, tests/cluster/test_launch.py",
    "22_dlrm": "docs/how-to/embedding-tables.md, tests/embedding",
    "23_parameter_server": "docs/how-to/parameter-server.md, tests/cluster/test_parameter_server.py",
    "a_pod_you_do_not_have": "README.md plans for as many chips",
    "pynative_style": "tests/runtime/test_sharded_function.py has such a program; from_mindspore is a quick notebook",
    "quick_start": "README.md and docs/tutorials/first-sharded-function.md; from_mindspore is a quick notebook",
    "train_stop_continue": "docs/how-to/save-and-restore.md, docs/how-to/recover-and-resize.md",
    "where_shards_live": "tests/cluster/test_processes.py and docs/how-to/several-hosts.md launch processes",
    "which_layout": "docs/how-to/what-if.md plans, draws and asks why",
}
"""Scripts and notebooks that take long, each with the quick tests of what it shows."""


@pytest.fixture(autouse=True, scope="module")
def search_budget():
    """The default: users see these plans."""


def test_all_are_here():
    assert [p.name[:2] for p in SCRIPTS] == [f"{i:02}" for i in range(1, len(SCRIPTS) + 1)]
    assert len(SCRIPTS) >= 8
    assert {p.stem for p in NOTEBOOKS} >= {
        "quick_start", "which_layout", "pynative_style", "from_mindspore", "a_pod_you_do_not_have", "train_stop_continue",
        "where_shards_live",
    }  # fmt: skip


def each(paths):
    return [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in paths]


@pytest.mark.parametrize("path", each(SCRIPTS))
def test_script(path, as_user_code, capsys):
    runpy.run_path(str(path), run_name="__main__")  # in this process: it saves starting JAX again
    folder = re.escape(tempfile.gettempdir()) + r"/\w+"
    printed, stored = re.sub(folder, "/tmp/folder", capsys.readouterr().out), OUTPUTS / f"{path.stem}.txt"
    assert printed
    if os.environ.get("SHARDFN_UPDATE_GOLDEN"):
        stored.write_text(printed, encoding="utf-8")
    elif IS_THE_RELEASE_SHOWN and path.stem not in VARYING:
        assert without_numbers(printed) == without_numbers(stored.read_text(encoding="utf-8"))


def without_numbers(text: str) -> list[str]:
    """The words of an output, for the site: losses and times differ between machines."""
    return re.sub(r"0x[0-9a-f]+|[-+]?\d[\d.,]*(e[-+]?\d+)?( ?(B|KiB|MiB|GiB|ns|µs|ms|s)\b)?|-+", " # ", text).split()


def test_a_script_runs_alone():
    """Examples say themselves how many devices they need."""
    environment = bare_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS[0])], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def tidy(notebook) -> None:
    """Leave out what differs from run to run: messages on standard error, the number of writes, and when a cell ran."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count, cell.metadata = None, nbformat.NotebookNode()
            printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
            rest = [output for output in cell.outputs if output.output_type != "stream"]
            cell.outputs = ([nbformat.v4.new_output("stream", text=printed)] if printed else []) + rest
            for output in cell.outputs:
                output.pop("execution_count", None)
                if output.output_type == "execute_result":
                    output.execution_count = None


def shown(cell) -> list[str]:
    """The texts below a cell, without their numbers, and the kinds of its other outputs."""
    found = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {"text/plain": output.get("text", "")})
        is_figure = data.keys() - {"text/plain"}
        found.append(", ".join(sorted(data)) if is_figure else " ".join(without_numbers(data["text/plain"])))
    return found


@pytest.mark.parametrize("path", each(NOTEBOOKS))
def test_notebook_shows_what_is_stored(path, monkeypatch):
    stored = nbformat.read(path, as_version=4)
    again = nbformat.read(path, as_version=4)
    monkeypatch.setenv("XLA_FLAGS", bare_environment()["XLA_FLAGS"])
    for name in ("NPROC", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    nbclient.NotebookClient(again, timeout=180, kernel_name="python3", record_timing=False).execute()
    tidy(again)
    if os.environ.get("SHARDFN_UPDATE_GOLDEN"):
        again.metadata = stored.metadata
        nbformat.write(again, path)
        return
    cells = zip(stored.cells, again.cells, strict=True) if IS_THE_RELEASE_SHOWN else ()
    for before, after in cells:
        assert shown(after) == shown(before), after.source
    assert any("image/svg+xml" in texts for cell in again.cells for texts in shown(cell)), "a figure is shown"
