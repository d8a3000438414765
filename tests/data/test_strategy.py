"""A dataset_strategy to layouts: the words, tuples over several dims, Layouts, the context, a plan's grid; its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardfn
from shardfn import AUTO
from shardfn.data import input_shardings
from shardfn.errors import DeviceError, StrategyError, StrategyTypeError
from shardfn.mindspore import Layout, set_auto_parallel_context

P = PartitionSpec
IMAGE, MASK, LABEL = (
    jax.ShapeDtypeStruct(s, d) for s, d in (((8, 16, 32, 3), "float32"), ((8, 16, 32), "int32"), ((8,), "int32"))
)
BATCH = {"image": IMAGE, "mask": MASK, "label": LABEL}
GRID = Layout((2, 4), ("row", "column"))


def pieces(laid):
    """What one device holds of each array."""
    return [s.shard_shape(leaf.shape) for s, leaf in zip(laid.shardings, laid.leaves, strict=True)]


WHOLE = [(8, 16, 32, 3), (8, 16, 32), (8,)]
EACH = [(1, 16, 32, 3), (1, 16, 32), (1,)]
CASES = [
    ("full_batch", WHOLE),
    ("data_parallel", EACH),
    ((None, None, None), EACH),
    (((2, 2, 2, 1), (2, 2, 2), (2,)), [(4, 8, 16, 3), (4, 8, 16), (4,)]),
    (((1, 2, 4, 1), (1, 2, 4), (1,)), [(8, 8, 8, 3), (8, 8, 8), (8,)]),
    ({"label": (8,), "image": (1, 8, 1, 1), "mask": (1, 1, 1)}, [(8, 2, 32, 3), (8, 16, 32), (1,)]),
    (((1, 2, 1, 1), (1, 1, 4), (8,)), [(8, 8, 32, 3), (8, 16, 8), (1,)]),
    ((GRID("None", "row", "column", "None"), GRID("None", "row", "column"), GRID("row")), [(8, 8, 8, 3), (8, 8, 8), (4,)]),
    ((GRID("row", "None", "None", "None"), (2, 1, 1), None), [(4, 16, 32, 3), (4, 16, 32), (1,)]),
    ((NamedSharding(GRID.mesh(), P("column")), P("row", "column"), (1,)), [(2, 16, 32, 3), (4, 4, 32), (8,)]),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "held"), CASES, ids=str)
def test_every_form_of_a_strategy(strategy, held):
    assert pieces(input_shardings(BATCH, strategy)) == held


def test_dims_of_one_position_and_size_share_axes():
    image, mask, label = (s.spec for s in input_shardings(BATCH, ((1, 2, 4, 1), (1, 2, 4), (1,))).shardings)
    assert image[1:3] == mask[1:3]
    image, mask, label = (s.spec for s in input_shardings(BATCH, ((2, 2, 2, 1), (2, 1, 2), (2,))).shardings)
    assert image[0] == mask[0] == label[0] and image[2] == mask[2]


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({}, EACH),
        ({"full_batch": True}, WHOLE),
        ({"full_batch": False}, EACH),
        ({"dataset_strategy": "full_batch"}, WHOLE),
        ({"dataset_strategy": "data_parallel"}, EACH),
        ({"dataset_strategy": ((2, 1, 4, 1), (2, 1, 1), (1,))}, [(4, 16, 8, 3), (4, 16, 32), (8,)]),
        ({"dataset_strategy": (GRID("row", "column", "None", "None"), GRID("row", "None", "None"), GRID("column"))}, [(4, 4, 32, 3), (4, 16, 32), (2,)]),
        ({"device_num": 4}, [(2, 16, 32, 3), (2, 16, 32), (2,)]),
        ({"parallel_mode": "stand_alone"}, WHOLE),
        ({"parallel_mode": "data_parallel"}, EACH),
    ],
    ids=str,
)  # fmt: skip
def test_without_a_strategy_the_context_says(settings, held):
    set_auto_parallel_context(**settings)
    assert pieces(input_shardings(BATCH, None)) == held


def test_what_is_given_comes_before_the_context():
    set_auto_parallel_context(full_batch=True)
    assert pieces(input_shardings(BATCH, "data_parallel")) == EACH


def step(w, x, label):
    return jnp.mean((x @ w - label[:, None]) ** 2)


X, W = jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((8, 32), "float32")
LABELS = jax.ShapeDtypeStruct((16,), "float32")


def test_on_a_plans_grid():
    plan = shardfn.plan(step, W, X, LABELS, in_strategy=((1, 4), (2, 1), (2,)))
    assert plan.axes == (("a", 4), ("b", 2)) or plan.mesh.axis_sizes in ((4, 2), (2, 4))
    batch = {"x": X, "label": LABELS}
    laid = input_shardings(batch, None, plan=plan)
    assert [s.spec for s in laid.shardings] == [plan.decision(name).partition_spec for name in ("x", "label")]
    assert all(s.mesh == plan.mesh for s in laid.shardings)
    other = input_shardings({"0": X, "1": LABELS}, None, plan=plan, arguments=("x", "label"))
    assert other.shardings == laid.shardings
    cut = input_shardings(batch, ((2, 1), (8,)), plan=plan)
    assert cut.shardings[0].spec == plan.decision("x").partition_spec
    assert pieces(cut) == [(8, 8), (2,)] and cut.shardings[1].mesh == plan.mesh
    assert pieces(input_shardings(batch, "full_batch", plan=plan)) == [(16, 8), (16,)]
    assert pieces(input_shardings(batch, "data_parallel", plan=plan)) == [(2, 8), (2,)]


def on_plan(**given):
    plan = shardfn.plan(step, W, X, LABELS, in_strategy=((1, 4), (2, 1), (2,)))
    return input_shardings(
        given.pop("batch", {"x": X, "label": LABELS}), given.pop("strategy", None), plan=plan, **given
    )


BAD = [
    (StrategyError, "cannot be 'fullbatch'", lambda: input_shardings(BATCH, "fullbatch")),
    (StrategyTypeError, "`strategy` must be a tuple with one entry for each input", lambda: input_shardings(BATCH, 8)),
    (StrategyError, "has 2 entries for 3 inputs", lambda: input_shardings(BATCH, ((8, 1, 1, 1), (8, 1, 1)))),
    (StrategyError, "16 is not divisible by 3", lambda: input_shardings(BATCH, ((1, 3, 1, 1), None, None))),
    (StrategyError, "which 8 devices cannot hold", lambda: input_shardings(BATCH, ((2, 2, 4, 1), None, None))),
    (StrategyError, "input 2 `label` has 1 dimension, but its entry has 2", lambda: input_shardings(BATCH, (None, None, (8, 1)))),
    (StrategyError, "data is read before any search", lambda: input_shardings(BATCH, (None, None, AUTO))),
    (StrategyError, "data parallel gives each device a shard", lambda: input_shardings({"x": jax.ShapeDtypeStruct((6, 2), "float32")}, "data_parallel")),
    (StrategyError, "the strategy and the source have different inputs", lambda: input_shardings(BATCH, {"image": None})),
    (DeviceError, "its devices are not here", lambda: input_shardings(BATCH, "full_batch", device="tpu-v5e:2x4")),
    (StrategyError, "both a plan and devices", lambda: on_plan(device="CPU")),
    (StrategyError, "do not name arguments", lambda: on_plan(arguments=("x",))),
    (StrategyError, "do not name arguments", lambda: on_plan(batch={"image": X})),
    (StrategyError, "the plan was made for float32\\[16, 8\\]", lambda: on_plan(batch={"x": LABELS, "label": LABELS})),
    (StrategyError, "no axes of", lambda: on_plan(strategy=((2, 2), (1,)))),
    (StrategyTypeError, "named axes and a plan are both given", lambda: on_plan(strategy=(GRID("row", "None"), None))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "match", "call"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_wrong_is_said(kind, match, call):
    with pytest.raises(kind, match=match) as caught:
        call()
    assert "fix:" in str(caught.value)


def test_a_target_plan_needs_devices_first():
    plan = shardfn.plan(step, W, X, LABELS, in_strategy=((1, 4), (2, 1), (2,)), device="tpu-v5e:2x4")
    with pytest.raises(DeviceError, match="not here"):
        input_shardings({"x": X, "label": LABELS}, None, plan=plan)
    laid = input_shardings({"x": X, "label": LABELS}, None, plan=plan.with_devices(jax.devices()))
    assert pieces(laid) == [(8, 8), (8,)]


def test_all_problems_at_once():
    with pytest.raises(StrategyError) as caught:
        input_shardings(BATCH, ((3, 1, 1, 1), (1, 5, 1), (8, 1)))
    assert len(caught.value.problems) == 3
    assert np.array_equal(
        [p.where.split(" ")[0] for p in caught.value.problems], ["strategy[0]", "strategy[1]", "strategy[2]"]
    )
