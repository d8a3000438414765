"""The benchmarks import what exists, also in the programs that they run in another process."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
IMPORT = re.compile(r"^\s*from (shardfn[\w.]*) import ([\w, ]+)", re.MULTILINE)
SOURCES = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/train/*.py"), *ROOT.glob("tests/runtime/*.py")])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_of_a_script_and_of_its_texts_resolve(path):
    for module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
        found = importlib.import_module(module)
        for name in (part.split(" as ")[0].strip() for part in names.split(",")):
            assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), f"{module} has no {name}"
