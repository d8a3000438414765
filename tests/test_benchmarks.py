"""The benchmarks import what exists, run at a tiny size, and write what RESULTS.md shows."""

import argparse
import dataclasses
import importlib
import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest

import shardfn
from benchmarks import compilers, harness, libraries, peers, plan_quality, results, speedup, truth

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


def test_every_table_of_the_files_is_on_the_page():
    files, page = results.read(), results.PAGE.read_text(encoding="utf-8")
    assert results.shown(page, files) == files, "run benchmarks/results.py"
    assert all(found["tables"] for found in files.values())


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
    number = re.compile(r"\d[\d,]*(?:\.\d+)?")
    for name, figures, section in quoted:
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert [figure for figure in figures.split("; ") if figure not in text] == [], name
        assert set(number.findall(figures)) <= set(number.findall(sections[section])), (figures, section)


def test_lines_that_a_user_writes_are_those_between_the_marks():
    module = importlib.import_module("benchmarks.peer_steps.plain")
    assert peers.written(module, "mlp", "fsdp, constrained") == (peers.written(module, "mlp", "fsdp")[0], 1)
    assert peers.written(module, "gpt2", "tensor")[0] > peers.written(module, "mlp", "tensor")[0] > 10


WITHOUT_DEVICES = {"gallery", "harness", "kind_steps", "iopddl", "parameter_server", "plan_time", "results"}
"""They plan for devices that are not here, solve, or serve from hosts."""


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.stem)
def test_a_benchmark_that_uses_devices_takes_the_platform(path):
    has_platform = "harness.parse(parser, devices=" in path.read_text(encoding="utf-8")
    assert has_platform != (path.stem in WITHOUT_DEVICES)


def test_platform_is_read_before_jax_starts(monkeypatch):
    parser, asked = argparse.ArgumentParser(), []
    monkeypatch.setattr(harness, "start", lambda backend, devices: asked.append((backend, devices)))
    assert harness.parse(parser, devices=8, argv=["--platform", "gpu"]).platform == "gpu"
    assert asked == [("gpu", 8)]


def test_ratios_of_a_compiled_matmul_are_one():
    shape = jax.ShapeDtypeStruct((64, 64), np.float32)
    found = compilers.ratios(shardfn.plan(jax.numpy.matmul, shape, shape, in_strategy=((1, 8), (8, 1))))
    assert found["bytes"] == found["flops"] == 1 and 0.9 < found["peak"] < 1.1


def test_scores_of_plans_are_those_of_the_best_layout_by_hand_that_fits():
    def row(layout, sent, peak, level=None, limit=""):
        figures = plan_quality.Figures(
            bytes=sent, peak=peak, flops=1.0, communication_s=sent, compute_s=0.0, even_s=0.0, memory_bytes=math.inf
        )
        bounds = {"ample": 100.0, "tight": 10.0}
        return plan_quality.Row("mlp", "cpu", 8, layout, figures, None, 0.0, level, limit, bounds.get(limit))

    plans = [
        row(f"plan {level} {limit}", 6.0, 9.0, level, limit) for limit in ("ample", "tight") for level in (0, 1, 2)
    ]
    (line,) = plan_quality.scores([row("data parallel", 3.0, 50.0), row("FSDP", 12.0, 10.0), *plans])
    assert (line["level 0"], line["level 0, tight"]) == (2.0, 0.5)  # data parallel does not fit the tight limit
    assert (line["level 1"], line["level 2"], line["checks passed"]) == (0.9, 2.0, "10 of 12")
    (alone,) = plan_quality.scores([row("FSDP", 12.0, 10.0), row("plan", 6.0, 9.0, 0, "ample")])
    assert (alone["level 0"], alone["level 1"], alone["level 0, tight"]) == (0.5, None, None)


def test_truth_counts_rows_by_how_close_they_are():
    row = truth.Row("mlp", "batch", True, {}, 100, 100, True, True, (1, 1), (100, 108), (1.0, 1.0), 0.0, 0.0)
    other = dataclasses.replace(row, good=False, compiled_bytes=110, peak=(100, 400))
    good, bad, both = truth.close([row, other])
    assert (good["rows"], good["bytes equal"], good["peak within 5 %"], good["10 %"]) == (1, 1, 0, 1)
    assert (bad["bytes equal"], bad["bytes within 5 %"], bad["25 %"], both["rows"]) == (0, 0, 0, 2)
    (found,) = truth.differences([row, other])
    assert (found["compiled"], found["peak"]) == (110, 0.25)


def test_libraries_times_a_plan_and_counts_what_another_objective_does_better():
    make = {name: make for _, name, make in libraries.functions(["jax"])}["image.resize"]
    row = libraries.measure("jax", "image.resize", make, "memory")
    assert row["plan s"] > 0 and row["ratio"] == row["plan s"] / row["trace and compile s"]
    (all_of,) = [line for line in libraries.summary([row, {**row, "ops": 300}]) if line["functions"] == "all"]
    assert all_of["count"] == 2 and all_of["ratio, median"] == pytest.approx(row["ratio"])
    kept = libraries.promises("jax", "image.resize", make)
    assert not kept["holds less elsewhere"] and kept["peak, memory"] > 0
