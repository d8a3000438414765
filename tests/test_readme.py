"""The code in README.md and docs/ runs, and the README's report is the one that its example prints.

`SHARDFN_UPDATE_GOLDEN=1` writes the printed report into the README instead.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(path: pathlib.Path, language: str) -> list[str]:
    return [text for name, text in FENCE.findall(path.read_text(encoding="utf-8")) if name == language]


def test_the_first_example_stands_at_the_top():
    assert README.read_text(encoding="utf-8").index("```python") < sum(
        len(line) + 1 for line in README.read_text(encoding="utf-8").splitlines()[:29]
    )


def test_the_first_example_prints_its_report(tmp_path):
    code, shown = blocks(README, "python")[0], blocks(README, "text")[0]
    (tmp_path / "mlp.py").write_text(code)
    keep = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")} | {"COLUMNS": "110"}
    done = subprocess.run(
        [sys.executable, "mlp.py"], cwd=tmp_path, env=keep | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if os.environ.get("SHARDFN_UPDATE_GOLDEN"):
        text = README.read_text(encoding="utf-8")
        README.write_text(text.replace(f"```text\n{shown}```", f"```text\n{done.stdout}```", 1), encoding="utf-8")
        return
    assert done.stdout == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_python_block_runs(page, tmp_path, monkeypatch, as_user_code, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name} block {number}", "exec"), names)


def test_the_commands_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b", README.read_text(encoding="utf-8")))
    assert named and named <= targets


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
