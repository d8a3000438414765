"""Predictions held against what XLA compiles, on rows of `benchmarks/truth.py`; all its rows in the slow suite."""

import importlib.util
import pathlib
import sys

import pytest

from tests.marks import some_slow

PATH = pathlib.Path(__file__).parent.parent / "benchmarks" / "truth.py"
SPEC = importlib.util.spec_from_file_location("truth", PATH)
truth = importlib.util.module_from_spec(SPEC)
sys.modules["truth"] = truth
SPEC.loader.exec_module(truth)

CASES = {case.name: case for case in truth.cases()}
DEVIATIONS = {
    # JAX 0.12 permutes some shards of the table, which is sharded over both axes, where the prediction gathers.
    "gpt2 step, 2 layers: the same, and the vocabulary": (0.94, 1.01),
}
"""Bounds of predicted over compiled bytes, for the rows that are not exact on every release."""

EXACT = [
    "matmul: rows", "matmul: contracted", "matmul: 2 x 2 x 2, all three dims", "matmul: columns, result whole",
    "mlp forward: batch 2 x hidden 4", "mlp forward: w1 in rows, w2 in columns", "mlp step: batch",
    "mlp step: batch 2 x hidden 4", "attention: heads", "attention: batch 2 x heads 4", "attention: sequence",
    "scan forward: hidden", "scan step: hidden", "convnet forward: channels", "convnet forward: batch",
    "embedding forward: rows of tables", "embedding step: batch", "moe: experts", "batch norm: features",
    "batch norm: rows of w", "sort: along it", "cholesky solve: batch", "decode step: heads",
    "decode step: length of the cache", "generate, 8 tokens: heads", "cumsum: along it", "top_k: along it",
    "loop invariants: rows", "sinkhorn: rows",
    "convnet forward: height", "stencil, periodic: rows", "gpt2 step, 2 layers: batch 2 x heads 4",
]  # fmt: skip


def check(name):
    row = truth.measure(CASES[name])
    least, most = DEVIATIONS.get(name, (1.0, 1.0))
    assert row.arguments_exact and row.results_exact
    assert row.ratio is not None and least <= row.ratio <= most
    assert row.flops[0] == pytest.approx(row.flops[1], rel=0.02)


@pytest.mark.parametrize("name", some_slow(EXACT, ["gpt2 step, 2 layers: batch 2 x heads 4"]))
def test_truth_row_of_the_quick_set_is_exact(name):
    assert name not in DEVIATIONS
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_truth_row_is_exact_or_within_its_known_deviation(name):
    check(name)


def test_deviations_name_rows():
    assert DEVIATIONS.keys() <= CASES.keys()
