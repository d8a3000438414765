"""`benchmarks/partition_diff.py`: the predicted partitioned program beside XLA's own, op by op."""

import pytest

from benchmarks import partition_diff, truth

CASES = {case.name: case for case in truth.cases()}


def sides(name):
    function, args = truth.sharded(CASES[name])
    return function.plan(*args), partition_diff.partitioned_by_xla(function, args)


@pytest.mark.parametrize("name", ["matmul: columns, result whole", "mlp step: batch", "loop invariants: rows"])
def test_diff_of_a_true_prediction_is_empty(name):
    found = partition_diff.lines(*sides(name))
    assert any(op.kind == "dot" for line in found for op in line.both)
    assert partition_diff.differences(found) == []


def test_diff_of_another_program_names_the_ops_of_each_side():
    plan, _ = sides("matmul: rows")
    _, dump = sides("matmul: contracted")
    found = partition_diff.lines(plan, dump)
    assert partition_diff.differences(found) == [
        "XLA all-reduce f32[512,1024]", "XLA dot f32[512,1024]", "predicted dot f32[64,1024]",
    ]  # fmt: skip
    (line,) = [text for text in partition_diff.text(found, every=False) if "dot f32[64,1024]" in text]
    assert line.split() == ["dot", "f32[64,1024]", "dot", "f32[512,1024]"]


def test_drift_lists_what_is_new_and_what_is_gone():
    now, before = {"a": ["XLA dot f32[2]"], "b": []}, {"a": ["XLA dot f32[2]"], "b": ["XLA pad f32[3]"]}
    assert list(partition_diff.drift(now, before)) == ["b\n  - XLA pad f32[3]"]
    assert list(partition_diff.drift(before, now)) == ["b\n  + XLA pad f32[3]"]
