"""The benchmarks import what exists, run at a tiny size, and write what RESULTS.md shows."""

import importlib
import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest

from benchmarks import harness, speedup

ROOT = pathlib.Path(__file__).parent.parent
IMPORT = re.compile(r"^\s*from (shardfn[\w.]*) import ([\w, ]+)", re.MULTILINE)
SOURCES = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/train/*.py"), *ROOT.glob("tests/runtime/*.py")])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_of_a_script_and_of_its_texts_resolve(path):
    for module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
        found = importlib.import_module(module)
        for name in (part.split(" as ")[0].strip() for part in names.split(",")):
            assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), f"{module} has no {name}"


def test_speedup_compares_every_number_of_devices_with_the_first():
    one, two = speedup.in_this_process(["mlp"], "tiny", [1, 2], rounds=3)
    assert one["speed-up"] == one["of ideal"] == 1
    assert (one["sharding"], one["devices"], two["devices"]) == ("unsharded", 1, 2)
    assert "2 devices" in two["sharding"] and two["ms"] > 0
    assert two["of ideal"] == two["speed-up"] / 2


def test_saved_tables_say_where_and_how_they_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks" / "speedup.py"), "--json", "out.json", "--rounds", "5"])
    rows = [{"ms": np.float32(1.5), "bound": math.inf, "shape": (2, 4)}]
    harness.save(tmp_path / "out.json", {"steps": rows}, notes=["two cores"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tables"] == {"steps": [{"ms": 1.5, "bound": None, "shape": [2, 4]}]}
    assert found["command"] == "python benchmarks/speedup.py --rounds 5"
    assert found["versions"]["jax"] == jax.__version__
    assert found["machine"]["cores"] >= 1 and found["notes"] == ["two cores"]
    assert str(ROOT) not in json.dumps(found)
