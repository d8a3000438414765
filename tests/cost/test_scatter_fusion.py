"""What a scatter computes itself on GPUs and TPUs, by the temporaries of programs; compiled only in the tests marked so."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.runtime.verify import compile_plan


def added(x, ids):
    return jnp.zeros((4096, 256)).at[ids].add(2 * jnp.tanh(x))


def added_to_what_is_computed(x, y, ids):
    return jnp.tanh(y).at[ids].add(2 * jnp.tanh(x))


def added_to_what_it_reads(x, ids):
    return x.at[ids].add(jnp.tanh(x[: len(ids)]))


def added_as_many_as_rows(x, ids):
    return x.at[ids].add(jnp.tanh(x))


def added_and_summed(x, ids):
    rows = 2 * jnp.tanh(x)
    return jnp.zeros((4096, 256)).at[ids].add(rows), rows.sum()


def added_products(x, w, ids):
    return jnp.zeros((4096, 256)).at[ids].add(x @ w)


ROWS, IDS = jax.ShapeDtypeStruct((2**20, 256), jnp.float32), jax.ShapeDtypeStruct((2**20,), jnp.int32)
HALF = jax.ShapeDtypeStruct((2**19,), jnp.int32)
SMALL, WEIGHTS = (jax.ShapeDtypeStruct((n, 256), jnp.float32) for n in (4096, 256))
# Function, arguments, and the MiB of temporaries on a GPU and on a TPU. Each was compiled.
PROGRAMS = {
    "elementwise": (added, (ROWS, IDS), 0, 0),
    "array written over": (added_to_what_is_computed, (ROWS, SMALL, IDS), 0, 0),
    "two readers": (added_and_summed, (ROWS, IDS), 1024, 0),
    "what is written over": (added_to_what_it_reads, (ROWS, HALF), 512, 512),
    "as many updates as rows": (added_as_many_as_rows, (ROWS, IDS), 1024, 1024),
    "matmul": (added_products, (ROWS, WEIGHTS, IDS), 1024, 1024),
}
TARGETS = ("h100:1", "tpu-v5e:2x2")
NEAR = 10.0
"""MiB: of the indices and of parts of sums."""


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("target", TARGETS)
def test_scatter_computes_its_updates(name, target):
    function, arguments, *mib = PROGRAMS[name]
    made = plan_of(function, arguments, target)
    assert made.cost.memory.temporaries / 2**20 == pytest.approx(mib[TARGETS.index(target)], abs=NEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_scatter_computes_its_updates_compiled_for_gpu(cuda, name):
    function, arguments, mib, _ = PROGRAMS[name]
    assert compile_plan(plan_of(function, arguments, "h100:1")).temp_bytes / 2**20 == pytest.approx(mib, abs=NEAR)


@pytest.mark.tpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_scatter_computes_its_updates_compiled_for_tpu(name):
    function, arguments, _, mib = PROGRAMS[name]
    assert compile_plan(plan_of(function, arguments, "tpu-v5e:2x2")).temp_bytes / 2**20 == pytest.approx(mib, abs=NEAR)


def plan_of(function, arguments, target):
    entries = tuple((1,) * len(argument.shape) for argument in arguments)
    return shardfn.plan(function, *arguments, in_strategy=entries, device=target)
