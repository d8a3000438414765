"""MindSpore's functions: slices of ranks merged, and files of ranks rewritten for another strategy."""

import json

import hypothesis
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import strategies as st

from shardfn.errors import CheckpointError, CheckpointFileError
from shardfn.mindspore import Layout, merge_sliced_parameter, rank_list_for_transform, transform_checkpoints
from shardfn.mindspore.rank_checkpoints import boxes_of, read_strategy
from tests.messages import refusal


def row(matrix, tensor_map, shape, size=0, step=0):
    return {"dev_matrix": matrix, "tensor_map": tensor_map, "tensor_shape": shape, "field": 0,
            "opt_weight_shard_size": size, "opt_weight_shard_step": step}  # fmt: skip


def file(path, **rows):
    items = {"parallel_layout_item": rows, "parallel_strategy_item": {}, "current_stage": 2}
    path.write_text(json.dumps(items))
    return path


WHOLE = np.arange(8 * 12, dtype="float32").reshape(8, 12)


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "shape"),
    [
        ([2, 4], [1, 0], (4, 3)),
        ([2, 4], [0, 1], (2, 6)),
        ([2, 4], [-1, -1], (8, 12)),
        ([2, 4], [[1, 0], -1], (1, 12)),
        ([2, 2, 2], [0, -1], (4, 12)),
        ([8], [0, -1], (1, 12)),
    ],
)
def test_slices_merge_to_the_whole(matrix, tensor_map, shape):
    """Slices as MindSpore's rule of dev_matrix and tensor_map has them, worked out here by hand of the ranks' coordinates."""
    slices = []
    for rank in range(int(np.prod(matrix))):
        at = np.unravel_index(rank, matrix)
        index = []
        for n, axes in zip(WHOLE.shape, tensor_map, strict=True):
            piece, pieces = 0, 1
            for k in axes if isinstance(axes, list) else [axes]:
                if k >= 0:
                    place = len(matrix) - 1 - k
                    piece, pieces = piece * matrix[place] + int(at[place]), pieces * matrix[place]
            index.append(slice(piece * n // pieces, (piece + 1) * n // pieces))
        slices.append(WHOLE[tuple(index)])
    assert slices[0].shape == shape
    np.testing.assert_array_equal(merge_sliced_parameter(slices, row(matrix, tensor_map, [8, 12])), WHOLE)


def test_slices_without_a_strategy_are_joined():
    np.testing.assert_array_equal(merge_sliced_parameter([WHOLE[:4], WHOLE[4:]]), WHOLE)


def test_optimizer_shards_merge():
    """Rows cut 2 ways by the strategy, and each slice again 4 ways over the ranks that hold the same."""
    cut = row([2, 4], [1, -1], [8, 12], 4, 1)
    slices = [WHOLE[rank : rank + 1] for rank in range(8)]
    np.testing.assert_array_equal(merge_sliced_parameter(slices, cut), WHOLE)


PROBLEMS = {
    "there are no slices to merge": lambda: merge_sliced_parameter([]),
    "slice 1 is float32[2, 12], and slice 0 float32[8, 12]": lambda: merge_sliced_parameter(
        [WHOLE, WHOLE[:2], WHOLE.astype(int)], Layout((3,), ("x",))("x", "None")),
    "there are 2 slices for 4 ranks": lambda: merge_sliced_parameter([WHOLE, WHOLE], Layout((4,), ("x",))("x", "None")),
    "the slices have 2 dims, and the strategy 1": lambda: merge_sliced_parameter([WHOLE, WHOLE], Layout((2,), ("x",))("x")),
    "a strategy is a Layout or a dict, not a tuple": lambda: merge_sliced_parameter([WHOLE, WHOLE], (2, 1)),
    "the strategy of the parameter cannot be read": lambda: merge_sliced_parameter([WHOLE, WHOLE], {"dev_matrix": [2]}),
    "there is no rank 9": lambda: rank_list_for_transform(9, None, {"w": row([2, 4], [1, 0], [8, 12])}),
}  # fmt: skip


@pytest.mark.parametrize("text", PROBLEMS)
def test_bad_slices_are_refused(text):
    error = refusal(PROBLEMS[text])
    assert isinstance(error, CheckpointError) and text in error.problems[0].what


def test_ranks_that_a_rank_is_made_of():
    cut, other = {"w": row([2, 4], [-1, 0], [8, 12])}, {"w": row([4, 2], [1, 0], [8, 12])}
    assert rank_list_for_transform(0) == [0]
    assert rank_list_for_transform(3, None, cut) == [0], "each source rank has everything"
    assert rank_list_for_transform(0, cut) == [0, 1, 2, 3], "the columns are cut 4 ways, over the fast axis"
    assert rank_list_for_transform(5, cut, cut) == [5], "its own file has it"
    assert rank_list_for_transform(1, cut, other) == [2, 3]


def write(folder, strategies, whole, name="ckpt-1_1.safetensors"):
    """The files of a run's ranks, as the strategy cuts them."""
    cut = read_strategy(strategies)
    ranks = max((c.ranks for c in cut.values()), default=1)
    for rank in range(ranks):
        part = folder / f"rank_{rank}"
        part.mkdir(parents=True, exist_ok=True)
        held = {
            n: np.ascontiguousarray(x[boxes_of(cut[n], x.shape)[rank]] if n in cut else x) for n, x in whole.items()
        }
        safetensors.numpy.save_file(held, part / name)


GRIDS = [((2, 4), 2), ((4, 2), 2), ((8,), 1), ((2, 2, 2), 3), ((4,), 1), ((3, 2), 2), ((1,), 1)]


@st.composite
def strategies(draw):
    """A strategy of `w` (24, 48) and `v` (48,), any of them left out."""
    matrix, ndim = draw(st.sampled_from(GRIDS))
    rows = {}
    for name, shape in (("w", (24, 48)), ("v", (48,))):
        axes = draw(st.permutations(range(ndim)))
        taken = iter(axes)
        tensor_map = [next(taken) if draw(st.booleans()) and i < ndim else -1 for i in range(len(shape))]
        if draw(st.integers(0, 3)):
            rows[name] = row(list(matrix), tensor_map, list(shape))
    return rows


@hypothesis.given(source=strategies(), target=strategies())
@hypothesis.settings(max_examples=20)
def test_any_strategy_to_any_other(tmp_path_factory, source, target):
    tmp = tmp_path_factory.mktemp("ranks")
    rng = np.random.default_rng(0)
    whole = {"w": rng.normal(size=(24, 48)).astype("float16"), "v": rng.normal(size=48), "scale": np.array(2.0)}
    write(tmp / "src", source, whole)
    write(tmp / "want", target, whole)
    made = transform_checkpoints(tmp / "src", tmp / "dst", "next", source or None, target or None)
    for rank, path in enumerate(made):
        assert path == tmp / "dst" / f"rank_{rank}" / f"next{rank}.safetensors"
        got = safetensors.numpy.load_file(path)
        want = safetensors.numpy.load_file(tmp / "want" / f"rank_{rank}" / "ckpt-1_1.safetensors")
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
    assert len(made) == max([int(np.prod(c["dev_matrix"])) for c in target.values()], default=1)


def test_files_and_the_last_of_several(tmp_path):
    cut = file(tmp_path / "src.json", w=row([2], [0, -1], [8, 12]))
    write(tmp_path / "src", {"w": row([2], [0, -1], [8, 12])}, {"w": WHOLE * 0}, "net-9_1.safetensors")
    write(tmp_path / "src", {"w": row([2], [0, -1], [8, 12])}, {"w": WHOLE}, "net-10_1.safetensors")
    (only,) = transform_checkpoints(tmp_path / "src", tmp_path / "dst", "one", cut)
    np.testing.assert_array_equal(safetensors.numpy.load_file(only)["w"], WHOLE)


def test_transform_of_ranks_with_missing_slices_is_refused(tmp_path):
    cut = {"w": row([2, 2], [1, 0], [8, 12]), "u": row([2, 2], [1, 0], [8, 12])}
    write(tmp_path / "src", cut, {"w": WHOLE, "u": WHOLE})
    safetensors.numpy.save_file({"w": WHOLE[:4, :3]}, tmp_path / "src/rank_2/ckpt-1_1.safetensors")
    error = refusal(transform_checkpoints, tmp_path / "src", tmp_path / "dst", "x", cut)
    assert [problem.what for problem in error.problems] == ["rank 2 has no `u`", "the slices of `w` do not fit"]
    (tmp_path / "src/rank_1/ckpt-1_1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="there is no file of rank 1"):
        transform_checkpoints(tmp_path / "src", tmp_path / "dst", "x", cut)
    with pytest.raises(CheckpointFileError, match="cannot be read"):
        transform_checkpoints(tmp_path / "src", tmp_path / "dst", "x", tmp_path / "none.json")


@pytest.mark.parametrize("which", ["src_strategy_file", "dst_strategy_file"])
def test_a_strategy_that_names_no_parameter_is_refused(which, tmp_path):
    (tmp_path / "source" / "rank_0").mkdir(parents=True)
    safetensors.numpy.save_file(
        {"w": np.ones((8, 4), np.float32)}, tmp_path / "source" / "rank_0" / "checkpoint0.safetensors"
    )
    other = {"params.w": row([1], [-1, -1], [8, 4])}
    with pytest.raises(CheckpointError, match=f"`{which}` names no parameter"):
        transform_checkpoints(tmp_path / "source", tmp_path / "target", "net", **{which: other})


def test_ranks_that_differ_need_a_source_strategy(tmp_path):
    for rank in range(2):
        (tmp_path / "source" / f"rank_{rank}").mkdir(parents=True)
        array = np.full((8, 4), rank, np.float32)
        safetensors.numpy.save_file(
            {"w": array}, tmp_path / "source" / f"rank_{rank}" / f"checkpoint{rank}.safetensors"
        )
    with pytest.raises(CheckpointError, match="there is no source strategy"):
        transform_checkpoints(tmp_path / "source", tmp_path / "target", "net")
    with pytest.raises(CheckpointError, match="there is no folder"):
        transform_checkpoints(tmp_path / "nowhere", tmp_path / "target", "net")
