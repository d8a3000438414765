"""What `set_algo_parameters` leaves out of a search."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from examples.models import abstract, mlp
from shardfn.search.labels import filters
from shardfn.search.problem import Algorithm
from shardfn.solver.labelling import labelling, total_cost

S = jax.ShapeDtypeStruct
X, W = S((16, 32), jnp.float32), S((32, 64), jnp.float32)
HERE = {"device": "h100:8", "level": 2, "search_mode": "dynamic_programming"}


@pytest.fixture(autouse=True)
def _defaults():
    yield
    shardfn.mindspore.reset_algo_parameters()


def dense(x, w):
    return jax.nn.relu(x @ w)


def test_filters_without_rules_leave_nothing_out():
    one = labelling([[1, 2], [3, 1]], tables=[((0, 1), [0, 4, 1, 0])])
    assert filters.forbid(one, {}).costs == one.costs
    assert filters.drop_dominated(one, 1e-9)[1] <= 1e-9 * 2


@pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming"])
def test_fully_use_devices_shards_what_is_cheaper_unsharded(mode):
    options = HERE | {"search_mode": mode, "out_strategy": ((1, 1),)}
    idle = shardfn.plan(dense, X, W, **options)
    shardfn.mindspore.set_algo_parameters(fully_use_devices=True)
    full = shardfn.plan(dense, X, W, **options)
    assert idle.cost.matrix_flops == 8 * full.cost.matrix_flops
    assert full.cost.time_s > idle.cost.time_s, "else the rule was not what decided"


def test_fully_use_devices_keeps_an_entry_and_warns():
    shardfn.mindspore.set_algo_parameters(fully_use_devices=True)
    with pytest.warns(UserWarning, match="2 of 8 devices would do: nothing is sharded over axis b of 4"):
        made = shardfn.plan(dense, X, W, in_strategy=((2, 1), (1, 1)), device="h100:8")
    assert [d.strategy for d in made.inputs] == [(2, 1), (1, 1)]
    assert any("fully_use_devices" in text for text in made.diagnostics)


def test_fully_use_devices_exempts_an_op_that_cannot():
    shardfn.mindspore.set_algo_parameters(fully_use_devices=True)
    with pytest.warns(UserWarning, match="1 of 8 devices would do"):
        made = shardfn.plan(dense, S((3, 5), jnp.float32), S((5, 7), jnp.float32), **HERE)
    assert [d.strategy for d in made.inputs] == [(1, 1), (1, 1)]


def strategies(made):
    return [d.strategy for d in (*made.inputs, *made.outputs)]


def slices(made):
    """The sizes on one device of the sharded last dimensions of each matmul's operands and result."""
    partitioned = made.partitioned
    for op in partitioned.graph.ops:
        if op.name == "dot_general":
            for value in (*op.inputs, *op.outputs):
                if partitioned.graph.values[value].shape and partitioned.shards(value)[-1] > 1:
                    yield partitioned.local_shape(value)[-1]


def test_tensor_slice_align_makes_shards_of_matmuls_multiples():
    args = S((1, 512), jnp.float32), S((512, 8192), jnp.float32)  # one row: only the last dimensions are worth sharding
    free = shardfn.plan(dense, *args, **HERE)
    assert set(slices(free)) == {1024}
    shardfn.mindspore.set_algo_parameters(tensor_slice_align_enable=True, tensor_slice_align_size=1024)
    assert strategies(shardfn.plan(dense, *args, **HERE)) == strategies(free), "aligned as it is"
    for size in (256, 384, 1000):
        args = S((1, 65536), jnp.float32), S((65536, 4 * size), jnp.float32)
        shardfn.mindspore.set_algo_parameters(tensor_slice_align_enable=False)
        assert set(slices(shardfn.plan(dense, *args, **HERE))) == {size // 2}
        shardfn.mindspore.set_algo_parameters(tensor_slice_align_enable=True, tensor_slice_align_size=size)
        found = shardfn.plan(dense, *args, **HERE)
        assert all(n % size == 0 for n in slices(found))
        assert found.cost.flops < 65536 * 4 * size, "something is sharded nevertheless"


@pytest.mark.parametrize("seed", range(20))
def test_drop_dominated_loses_no_more_than_it_says(seed):
    random = np.random.default_rng(seed)
    sizes = random.integers(2, 5, 5)
    pairs = list(itertools.combinations(range(5), 2))
    tables = [((a, b), random.integers(0, 4, sizes[a] * sizes[b])) for a, b in pairs[:: 1 + seed % 3]]
    usage = [(node, 0, 9, random.integers(0, 9, n)) for node, n in enumerate(sizes)] if seed % 2 else []
    every = labelling([random.integers(4, 9, n) for n in sizes], tables=tables, usage_intervals=usage)
    smaller, lost = filters.drop_dominated(every, 0.3)
    best, left = (
        min(total_cost(one, choice) for choice in itertools.product(*map(range, sizes))) for one in (every, smaller)
    )
    assert best <= left <= best + lost
    assert lost <= 0.3 * best


@pytest.mark.slow
def test_algo_approxi_keeps_a_bounded_gap():
    function, args = abstract(mlp.make)
    options = HERE  # where the partitioned program costs what the label model estimates: else there is no gap
    exact = shardfn.plan(function, *args, **options)
    shardfn.mindspore.set_algo_parameters(enable_algo_approxi=True, algo_approxi_epsilon=1.0)
    rough = shardfn.plan(function, *args, **options)
    for made in (exact, rough):
        assert made.gap is None or 0 <= made.gap <= 0.5  # the best flow need not be the model's optimum
    assert rough.cost.time_s <= 3 * exact.cost.time_s


def test_algo_parameters_are_part_of_the_cache_key_of_a_plan():
    function = shardfn.shard(dense, **HERE, out_strategy=((1, 1),))
    before = function.plan(X, W)
    shardfn.mindspore.set_algo_parameters(fully_use_devices=True)
    assert function.plan(X, W) != before
    shardfn.mindspore.reset_algo_parameters()
    assert function.plan(X, W) == before


def test_algorithm_fields_are_those_of_the_context():
    assert Algorithm() == Algorithm(
        **{n: shardfn.mindspore.get_algo_parameters(n) for n in Algorithm.__dataclass_fields__}
    )
