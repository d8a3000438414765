"""Predictions held against what XLA compiles, on rows of `benchmarks/truth.py`; all its rows in the slow suite."""

import importlib.util
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).parent.parent / "benchmarks" / "truth.py"
SPEC = importlib.util.spec_from_file_location("truth", PATH)
truth = importlib.util.module_from_spec(SPEC)
sys.modules["truth"] = truth
SPEC.loader.exec_module(truth)

CASES = {case.name: case for case in truth.cases()}
DOCUMENTED = (PATH.parent.parent / "docs" / "deviations.md").read_text()

EXACT = [
    "matmul: rows", "matmul: contracted", "matmul: 2 x 2 x 2, all three dims", "matmul: columns, result whole",
    "mlp forward: batch 2 x hidden 4", "mlp forward: w1 in rows, w2 in columns", "mlp step: batch",
    "mlp step: batch 2 x hidden 4", "attention: heads", "attention: batch 2 x heads 4", "attention: sequence",
    "scan forward: hidden", "scan step: hidden", "convnet forward: channels", "convnet forward: batch",
    "embedding forward: rows of tables", "embedding step: batch", "moe: experts", "batch norm: features",
    "batch norm: rows of w", "sort: along it", "cholesky solve: batch", "decode step: heads",
    "decode step: length of the cache", "generate, 8 tokens: heads", "cumsum: along it", "top_k: along it",
    "convnet forward: height", "stencil, periodic: rows",
]  # fmt: skip


def is_documented(case):
    return f"| {case.program} | {case.layout} |" in DOCUMENTED


@pytest.mark.parametrize("name", EXACT)
def test_bytes_are_those_of_the_compiled_module(name):
    row = truth.measure(CASES[name])
    assert row.predicted_bytes == row.compiled_bytes
    assert row.arguments_exact and row.results_exact


def test_the_training_step_of_gpt2():
    row = truth.measure(CASES["gpt2 step, 2 layers: batch 2 x heads 4"])
    assert row.predicted_bytes == row.compiled_bytes
    assert row.flops[0] == pytest.approx(row.flops[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_true_or_documented(name):
    row = truth.measure(CASES[name])
    assert row.arguments_exact and row.results_exact
    assert is_documented(CASES[name]) or (row.ratio is not None and abs(row.ratio - 1) <= 0.05)
