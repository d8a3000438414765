"""Rows that an index counts through, which XLA on GPUs and TPUs keeps where they are; compiled only in the tests marked so."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.compiled.comparison import compare
from shardfn.runtime.verify import compile_plan
from tests.search.problems import S

B, T, V = 64, 16, 32
LABELS, POOL = (S((B, V), jnp.float32), S((B,), jnp.int32)), (S((B, T, V), jnp.float32), S((B,), jnp.int32))


def labels(y, t):
    return y[jnp.arange(B), t]


def of_time(y, t):
    return y[jnp.arange(B)[:, None], jnp.arange(T)[None], t]


def replaced(y, t, rows):
    return y.at[jnp.arange(B), t].set(rows)


def diagonal(y):
    return jnp.take_along_axis(y, jnp.arange(B)[:, None], 1)[:, 0]


SQUARE = (S((B, B), jnp.float32),)
GRADIENT = jax.grad(lambda y, t: (labels(y, t) ** 2).sum())
# Function, arguments, strategies of the arguments and of the result, and the bytes that a GPU sends. Each was compiled for both.
PROGRAMS = {
    "labels": (labels, LABELS, ((8, 1), (8,)), (8,), 0),
    "gradient": (GRADIENT, LABELS, ((8, 1), (8,)), (8, 1), 0),
    "gradient, classes sharded": (GRADIENT, LABELS, ((1, 8), (1,)), (1, 8), 448),
    "index alone sharded": (labels, LABELS, ((1, 1), (8,)), (8,), 0),
    "rows in another order": (lambda y, t: y[t, jnp.arange(V)], (S((B, V), jnp.float32), S((V,), jnp.int32)),
                              ((1, 8), (8,)), (8,), 0),
    "one of a sequence": (labels, POOL, ((2, 1, 4), (2,)), (2, 4), 0),
    "sequence sharded": (labels, POOL, ((2, 4, 1), (2,)), (2, 1), 6144),
    "two counted": (of_time, (S((B, T, V), jnp.float32), S((B, T), jnp.int32)), ((2, 4, 1), (2, 4)), (2, 4), 0),
    "diagonal of a batch": (diagonal, SQUARE, ((8, 1),), (8,), 0),
    "gradient of a diagonal": (jax.grad(lambda y: (diagonal(y) ** 2).sum()), SQUARE, ((8, 1),), (8, 1), 0),
    "rows set": (replaced, (*POOL, S((B, V), jnp.float32)), ((2, 1, 4), (2,), (2, 4)), (2, 1, 4), 0),
}  # fmt: skip


def plan_of(name, device):
    function, arguments, strategies, result, _ = PROGRAMS[name]
    return shardfn.plan(function, *arguments, device=device, in_strategy=strategies, out_strategy=(result,))


@pytest.mark.parametrize("name", PROGRAMS)
def test_counted_rows_stay_where_they_are_on_a_gpu(name):
    assert plan_of(name, "h100:8").cost.bytes_sent == PROGRAMS[name][-1]


def test_counted_rows_are_hidden_from_the_compiler_of_the_cpu():
    plan = plan_of("labels", jax.devices())
    found = compare(plan, compile_plan(plan))
    assert plan.cost.bytes_sent > 0
    assert all(p.bytes_sent == c.bytes_sent for _, p, c in found.kinds)


def test_numbers_of_which_some_are_replaced_do_not_count():
    def chosen(y, t):
        numbers = jnp.arange(B)
        return y[jnp.where(numbers < 3, 0, numbers), t]

    plan = shardfn.plan(chosen, *LABELS, device="h100:8", in_strategy=((8, 1), (8,)), out_strategy=((8,),))
    assert plan.cost.bytes_sent > 0


def test_the_search_shards_counted_rows():
    rows = 2**16
    picked = jax.grad(lambda y, t: (jnp.tanh(y)[jnp.arange(rows), t] ** 2).sum())
    made = shardfn.plan(picked, S((rows, 1024), jnp.float32), S((rows,), jnp.int32), device="h100:8", level=0)
    assert made.cost.bytes_sent == 0 and made.decision("y").strategy == (8, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_counted_rows_compiled_for_gpus(cuda, name):
    plan = plan_of(name, "h100:8")
    assert all(p.bytes_sent == c.bytes_sent for _, p, c in compare(plan, compile_plan(plan)).kinds)


@pytest.mark.tpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_counted_rows_compiled_for_tpus(name):
    plan = plan_of(name, "tpu-v5e:2x4")
    assert all(p.bytes_sent == c.bytes_sent for _, p, c in compare(plan, compile_plan(plan)).kinds)


COUNTED = jnp.arange(64)
DIAGONALS = {
    "diag": jnp.diag,
    "read": lambda x: x[COUNTED, COUNTED],
    "set": lambda x: x.at[COUNTED, COUNTED].set(0.0),
    "added": lambda x: x.at[COUNTED, COUNTED].add(1.0),
}


@pytest.mark.parametrize("name", DIAGONALS)
@pytest.mark.parametrize("device", ["h100:4", "tpu-v5e:2x4"])
def test_both_columns_of_an_index_count_along_one_dimension(name, device):
    """XLA's `GetGatherScatterBatchParallelDims` takes no column then; not compiled."""
    for entry in (None, ((4, 1),), ((2, 2),), ((1, 4),)):
        plan = shardfn.plan(
            DIAGONALS[name], S((64, 64), jnp.float32), device=device, **({"in_strategy": entry} if entry else {})
        )
        assert plan.cost.bytes_sent in (0, 384) and (entry is not None or plan.cost.bytes_sent == 0)
