"""The benchmarks import what exists, run at a tiny size, and write what RESULTS.md shows."""

import importlib
import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest

from benchmarks import harness, peers, results, speedup

ROOT = pathlib.Path(__file__).parent.parent
IMPORT = re.compile(r"^\s*from (shardfn[\w.]*) import ([\w, ]+)", re.MULTILINE)
SOURCES = sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/train/*.py"), *ROOT.glob("tests/runtime/*.py")])


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


def test_tables_of_the_results_are_those_of_the_files():
    page = results.PAGE.read_text(encoding="utf-8")
    assert results.filled(page, results.read()) == page, "run benchmarks/results.py"


def test_every_file_of_results_has_a_table():
    page = results.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^<!-- (\w+): ", page, re.MULTILINE)) == set(results.read())


def test_results_show_the_columns_that_are_asked_for_and_where_they_were_made():
    found = {"command": "python benchmarks/a.py", "date": "2026-01-02", "notes": ["busy"],
             "versions": {"python": "3.11.1", "shardfn": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "ray": "2.60"},
             "machine": {"processor": "P", "cores": 2, "load": 1.5, "device": "cpu"},
             "tables": {"rows": [{"name": "x", "ms": 12.345, "left out": 1}]}}  # fmt: skip
    page = results.filled("<!-- a: rows | name, ms -->\nold\n<!-- end -->\ntext", {"a": found})
    made = (
        "`python benchmarks/a.py`; 2026-01-02; JAX 0.10.2, Python 3.11.1, ray 2.60; P, 2 cores, load 1.5 at the start"
    )
    assert page.splitlines() == ["<!-- a: rows | name, ms -->", "| name | ms |", "|---|---:|", "| x | 12.3 |", "",
                                 f"{made}; on cpu. busy.", "<!-- end -->", "text"]  # fmt: skip
    with pytest.raises(KeyError, match="b"):
        results.filled("<!-- b: rows -->\n<!-- end -->", {"a": found})


def test_figures_that_pages_quote_stand_in_the_results():
    page = results.PAGE.read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    quoted = re.findall(
        r"^\| (\S+\.md) \| (.+?) \| (.+?) \|$", sections["Figures that other pages quote"], re.MULTILINE
    )
    assert quoted
    for name, figure, section in quoted:
        assert figure in " ".join((ROOT / name).read_text(encoding="utf-8").split()), (name, figure)
        numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", sections[section])
        assert set(re.findall(r"\d[\d,]*(?:\.\d+)?", figure)) <= set(numbers), (figure, section)


def test_lines_that_a_user_writes_are_those_between_the_marks():
    module = importlib.import_module("benchmarks.peer_steps.plain")
    assert peers.written(module, "mlp", "fsdp, constrained") == (peers.written(module, "mlp", "fsdp")[0], 1)
    assert peers.written(module, "gpt2", "tensor")[0] > peers.written(module, "mlp", "tensor")[0] > 10
