"""The code in README.md and docs/ runs and prints what the page shows; links lead somewhere.

A `text` block right below a `python` block is that block's output, where `...` stands for anything. A first line such as
`# mlp.py` names the file that the code is said to be in. `SHARDFN_UPDATE_GOLDEN=1` writes what was printed into the page, with
`-m ""` into slow pages too.
"""

import contextlib
import doctest
import io
import itertools
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(p for p in DOCS.rglob("*.md") if p.relative_to(DOCS).parts[0][0] != "_")]
SLOW = {
    "flax-nnx.md": "tests/test_nnx_arguments.py, tests/frontend/test_callee.py, tests/train/test_models.py",
    "plan-70b.md": "README.md plans 70B for 256 chips, and docs/how-to/what-if.md asks what if",
    "mixture-of-experts.md": "tests/experts",
    "own-mesh.md": "tests/runtime/test_ambient_mesh.py",
    "several-hosts.md": "tests/cluster",
    "pipeline.md": "tests/train/test_pipeline.py",
    "equinox.md": "tests/train/test_models.py",
    "embedding-tables.md": "tests/embedding",
    "keep-a-plan.md": "tests/test_layoutfile.py",
    "recompute.md": "tests/train/test_remat.py",
    "limit-memory.md": "tests/search/test_memory_limit.py; closed-over arrays in tests/frontend/test_closed_over.py",
    "pictures.md": "tests/draw draws every kind",
    "train-on-eight-devices.md": "tests/train/test_step.py trains in every mode; tests/test_demo.py searches",
    "training-modes.md": "tests/train/test_step.py, tests/train/test_pairs.py",
}
"""Pages that take long, each with the quick tests of what it shows."""
IS_THE_RELEASE_SHOWN = jax.__version__.startswith("0.10.")
"""Another release of XLA compiles other collectives and memory: there the blocks run, and outputs are not compared."""
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


@pytest.fixture(autouse=True, scope="module")
def search_budget():
    """The default: users see these plans."""


def blocks(path: pathlib.Path, language: str) -> list[str]:
    return [text for name, text in FENCE.findall(path.read_text(encoding="utf-8")) if name == language]


def code_and_output(text: str) -> list[tuple[re.Match, re.Match | None]]:
    """Each `python` block of a page, and the `text` block right below it if there is one."""
    fences = list(FENCE.finditer(text))
    found = []
    for fence, below in itertools.zip_longest(fences, fences[1:]):
        if fence[1] != "python":
            continue
        is_output = below is not None and below[1] == "text" and not text[fence.end() : below.start()].strip()
        found.append((fence, below if is_output else None))
    return found


def matches(shown: str, printed: str) -> bool:
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


def elided(shown: str, printed: str) -> str:
    """What was printed, with as many lines before and after a line `...` as were shown there."""
    before, found, after = shown.partition("...\n")
    lines = printed.splitlines(keepends=True)
    first, last = before.count("\n"), len(lines) - after.count("\n")
    return "".join([*lines[:first], "...\n", *lines[last:]]) if found and first < last else printed


def test_the_first_example_stands_at_the_top():
    assert README.read_text(encoding="utf-8").index("```python") < sum(
        len(line) + 1 for line in README.read_text(encoding="utf-8").splitlines()[:39]
    )


def test_the_first_example_prints_its_report_in_a_bare_environment(tmp_path):
    code, shown = blocks(README, "python")[0], blocks(README, "text")[0]
    (tmp_path / "mlp.py").write_text(code)
    keep = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")} | {"COLUMNS": "110"}
    done = subprocess.run(
        [sys.executable, "mlp.py"], cwd=tmp_path, env=keep | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert matches(shown, done.stdout) or "SHARDFN_UPDATE_GOLDEN" in os.environ, done.stdout


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=p.relative_to(ROOT).as_posix(), marks=[pytest.mark.slow] if p.name in SLOW else [])
        for p in PAGES
    ],
)
def test_every_python_block_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch, as_user_code):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    text = page.read_text(encoding="utf-8")
    outputs, lines = [], 0
    for code, shown in code_and_output(text):
        named = re.match(r"# (\w+\.py)\n", code[2])
        file, before = (named[1], 0) if named else (f"{page.stem}.py", lines)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * before + code[2], file, "exec"), names)
        lines += 0 if named else code[2].count("\n")
        if shown is not None:
            outputs.append((shown, printed.getvalue()))
    if os.environ.get("SHARDFN_UPDATE_GOLDEN"):
        for shown, printed in reversed(outputs):
            if not matches(shown[2], printed):
                text = text[: shown.start(2)] + elided(shown[2], printed) + text[shown.end(2) :]
        page.write_text(text, encoding="utf-8")
        return
    for shown, printed in outputs if IS_THE_RELEASE_SHOWN else ():
        assert matches(shown[2], printed), printed


def test_the_commands_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b", README.read_text(encoding="utf-8")))
    assert named and named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


IN_PARTS = [page for page in PAGES if page.parent != DOCS]


@pytest.mark.parametrize("page", IN_PARTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_page_has_one_title_and_at_most_1500_words(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert len(re.findall(r"\w[\w'.-]*", prose)) <= 1500
    assert page.name == "results.md" or len(re.findall(r"^# ", prose, re.M)) == 1
