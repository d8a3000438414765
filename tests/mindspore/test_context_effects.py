"""What the context changes in a sharded call. The context itself is in test_context.py."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn
from shardfn import AUTO, shard, train
from shardfn.errors import ContextError, ShardError
from shardfn.mindspore import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    Layout,
    ParallelMode,
    auto_parallel,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_context,
)
from tests.marks import some_slow
from tests.messages import refusal

X, W = np.ones((8, 16), np.float32), np.ones((16, 8), np.float32)
SEMI, FULL = {"parallel_mode": "semi_auto_parallel"}, {"parallel_mode": "auto_parallel", "full_batch": True}


def dense(x, w):
    return x @ w


def twice(x, w):
    return x @ w, {"sum": (x @ w).sum(0), "x": x}


def out_cuts(plan):
    return [d.strategy for d in plan.outputs]


# ---- how many devices


@pytest.mark.parametrize(
    ("settings", "options", "count"),
    [
        ({}, {}, 8),
        ({"device_num": 4}, {}, 4),
        ({"device_num": 1}, {}, 1),
        ({"device_num": 4}, {"device": "CPU"}, 4),
        ({"device_num": 2}, {"device": jax.devices()[4:]}, 2),
        pytest.param({"device_num": 4}, {"device": "cpu:64"}, 64, marks=pytest.mark.slow),
        ({"parallel_mode": "stand_alone"}, {}, 1),
        ({"parallel_mode": "stand_alone", "device_num": 8}, {}, 1),
        pytest.param({"parallel_mode": "semi_auto_parallel"}, {}, 8, marks=pytest.mark.slow),
        ({"parallel_mode": "auto_parallel", "device_num": 6}, {}, 6),
        pytest.param({"device_num": 8, "global_rank": 7}, {}, 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_devices_in_use(settings, options, count):
    set_auto_parallel_context(**settings)
    assert shardfn.plan(dense, X, W, **options).hardware.count == count
    if options.get("device") != "cpu:64":
        result = shard(dense, **options)(X, W)
        assert len(result.sharding.device_set) == count
        np.testing.assert_array_equal(result, X @ W)


def test_on_one_device_strategies_are_checked_and_the_function_runs_whole():
    set_auto_parallel_context(parallel_mode="stand_alone")
    plan = shardfn.plan(dense, X, W, in_strategy=((4, 1), (1, 2)))
    assert (plan.hardware.count, [d.strategy for d in plan.inputs]) == (1, [(1, 1), (1, 1)])
    assert any("one device" in finding for finding in plan.diagnostics)
    with pytest.raises(ShardError, match="not divisible"):
        shard(dense, ((3, 1), AUTO))(X, W)


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel"])
def test_modes_in_which_no_operator_is_cut(mode):
    set_auto_parallel_context(parallel_mode=mode)
    with pytest.raises(ContextError, match="semi_auto_parallel"):
        shard(dense, ((4, 1), AUTO))(X, W)
    reset_auto_parallel_context()
    shard(dense, ((4, 1), AUTO)).plan(X, W)


def test_device_target_is_the_default_of_device():
    set_context(device_target="GPU")
    with pytest.raises(ShardError, match="not here"):
        shard(dense)(X, W)
    assert shardfn.plan(dense, X, W, device="CPU").hardware.platform == "cpu"
    set_context(device_target="CPU")
    assert shard(dense)(X, W).sharding.device_set == set(jax.devices())


# ---- MindSpore's rule for out_strategy

# settings, function, out_strategy, the cuts of the results, whether it warns
OVERRIDES = [
    ({}, dense, ((1, 8),), [(1, 8)], False),
    (SEMI, dense, ((1, 8),), [(8, 1)], True),
    ({"parallel_mode": ParallelMode.AUTO_PARALLEL}, dense, ((1, 8),), [(8, 1)], True),
    (FULL, dense, ((1, 8),), [(1, 1)], True),
    ({**SEMI, "full_batch": True}, dense, ((1, 8),), [(1, 1)], True),
    ({**SEMI, "dataset_strategy": "full_batch"}, dense, ((1, 8),), [(1, 1)], True),
    ({**SEMI, "out_strategy_mode": "honour"}, dense, ((1, 8),), [(1, 8)], False),
    ({**FULL, "out_strategy_mode": "honour"}, dense, ((1, 8),), [(1, 8)], False),
    ({"full_batch": True}, dense, ((1, 8),), [(1, 8)], False),
    ({**SEMI, "device_num": 2}, dense, ((1, 2),), [(2, 1)], True),
    (SEMI, twice, ((1, 8), {"sum": (4,), "x": (1, 4)}), [(8, 1), (8,), (8, 1)], True),
    (FULL, twice, ((1, 8), AUTO), [(1, 1), (1,), (1, 1)], True),
    (SEMI, dense, None, None, False),
]


@pytest.mark.parametrize(
    ("settings", "function", "said", "cuts", "warns"), OVERRIDES, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_out_strategy_under_the_context(settings, function, said, cuts, warns):
    set_auto_parallel_context(**settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = shard(function, ((2, 1), AUTO), said)
        results = [sharded(X, W) for _ in range(2)][-1]
        plan = sharded.plan(X, W)
        sharded.explain(X, W)
    assert len(caught) == int(warns)
    if warns:
        (warning,) = caught
        assert warning.filename == __file__, "it is told where the user's call stands"
        assert "out_strategy_mode" in str(warning.message) and f"`{function.__name__}`" in str(warning.message)
    if cuts is not None:
        assert out_cuts(plan) == cuts
    for array, decision in zip(jax.tree.leaves(results), plan.outputs, strict=True):
        assert array.sharding.shard_shape(array.shape) == decision.local_shape
    jax.tree.map(np.testing.assert_array_equal, results, function(X, W))


@pytest.mark.parametrize("call", ["plan", "explain", "lower", "__call__"])
def test_the_warning_names_the_user_s_line_however_it_is_called(call):
    set_auto_parallel_context(**SEMI)
    with pytest.warns(UserWarning, match="overridden with data parallel") as caught:
        getattr(shard(dense, None, ((1, 8),)), call)(X, W)
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("given", [(None,), ((8, 1),)])
def test_an_out_strategy_that_the_mode_gives_too_is_kept_without_a_warning(given, recwarn):
    set_auto_parallel_context(**SEMI)
    made = shard(dense, None, given).plan(X, W)
    assert (made.outputs[0].strategy, made.outputs[0].source) == ((8, 1), "you")
    assert not [w for w in recwarn if "overridden" in str(w.message)]


# ---- the inputs of the data set


@pytest.mark.parametrize(
    ("settings", "ins", "cuts"),
    [
        ({"dataset_strategy": ((8, 1), (1, 1))}, None, [(8, 1), (1, 1)]),
        ({"dataset_strategy": ((2, 4),)}, None, [(2, 4), (4, 1)]),
        ({"dataset_strategy": (Layout((2, 4), ("dp", "mp"))("dp", "mp"),)}, None, [(2, 4), (4, 1)]),
        ({"dataset_strategy": ((8, 1), (1, 1))}, ((1, 2), (2, 1)), [(1, 2), (2, 1)]),
        ({"dataset_strategy": "full_batch"}, ((2, 1), (1, 1)), [(2, 1), (1, 1)]),
    ],
    ids=str,
)
def test_dataset_strategy_is_the_default_of_the_first_arguments(settings, ins, cuts):
    set_auto_parallel_context(**settings)
    plan = shardfn.plan(dense, X, W, in_strategy=ins, search_mode="sharding_propagation")
    assert [d.strategy for d in plan.inputs] == cuts
    np.testing.assert_array_equal(shard(dense, ins)(X, W), X @ W)


# ---- blocks, modes


def test_a_block_ends():
    sharded = shard(dense, None, ((1, 8),))
    with auto_parallel(**SEMI), pytest.warns(UserWarning, match="overridden"):
        assert out_cuts(sharded.plan(X, W)) == [(8, 1)]
    assert out_cuts(sharded.plan(X, W)) == [(1, 8)]


def test_settings_without_meaning_for_a_call_change_nothing_in_it():
    plain = shardfn.plan(dense, X, W, in_strategy=((2, 1), (1, 4)))
    set_auto_parallel_context(gradients_mean=False, enable_alltoall=True, pipeline_stages=1)
    for mode in (GRAPH_MODE, PYNATIVE_MODE):
        set_context(mode=mode)
        assert shardfn.plan(dense, X, W, in_strategy=((2, 1), (1, 4))) == plain


@pytest.mark.parametrize("mode", some_slow([*shardfn.search.MODES], ["auto"]))
def test_search_mode_of_the_context(mode):
    set_auto_parallel_context(search_mode=mode)
    np.testing.assert_array_equal(shard(dense)(X, W), X @ W)


# ---- save_graphs


def test_save_graphs_writes_every_plan(tmp_path):
    set_context(save_graphs=True, save_graphs_path=str(tmp_path / "graphs"))
    sharded = shard(dense, ((2, 1), (1, 4)))
    for _ in range(2):
        sharded(X, W)
    sharded(X[:4], W)
    shard(lambda x: jnp.tanh(x), ((8, 1),))(X)
    files = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert [f for f in files if f.startswith("dense")] == [
        f"dense_{n}_{end}" for n in range(2) for end in ("report.json", "strategies.txt")
    ]
    assert len(files) == 6
    data = json.loads((tmp_path / "graphs" / "dense_0_report.json").read_text())
    assert [row["strategy"] for row in data["arguments"]] == [[2, 1], [1, 4]]
    strategies = (tmp_path / "graphs" / "dense_0_strategies.txt").read_text()
    assert "dot_general" in strategies and "(2, 1)" in strategies
    set_context(save_graphs=False)
    sharded(X[:2], W)
    assert len(list((tmp_path / "graphs").iterdir())) == 6


def test_a_place_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    set_context(save_graphs=2, save_graphs_path=str(tmp_path / "file" / "inside"))
    with pytest.raises(ContextError, match="give a directory that can be written to"):
        shard(dense)(X, W)


# ---- strategy files that cannot be


@pytest.mark.parametrize("key", ["strategy_ckpt_load_file", "strategy_ckpt_save_file"])
def test_a_name_of_no_strategy_file_is_refused_where_it_is_set(key):
    for settings in ({key: "s.txt"}, {"strategy_ckpt_config": {key.removeprefix("strategy_ckpt_"): "s.txt"}}):
        error = refusal(lambda settings=settings: set_auto_parallel_context(**settings))
        assert "no name of a layout file" in str(error) and next(iter(settings)) in error.problems[0].where


@pytest.mark.parametrize("key", ["strategy_ckpt_load_file", "strategy_ckpt_save_file"])
def test_a_file_that_is_not_there_is_called_by_its_key(key, tmp_path):
    with auto_parallel(**SEMI, **{key: str(tmp_path / "none/s.json")}):
        step = train.step(lambda w, x: jnp.mean(x @ w), optax.sgd(0.1))
        for call in (lambda: shard(dense).plan(X, W), lambda: step.init(W, X)):
            error = refusal(call)
            assert error.problems[0].where.startswith(f"{key} = ") and "recipe" not in error.problems[0].fix
