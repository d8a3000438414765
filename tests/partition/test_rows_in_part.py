"""Gathers and scatters of which each row takes a part of a sharded dimension, against what XLA compiles for the CPU."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.compiled.comparison import compare
from shardfn.runtime.verify import compile_plan
from tests.search.problems import S

TABLE, BLOCKS, ROWS = S((512, 32), jnp.float32), S((512, 32, 16), jnp.float32), S((24,), jnp.int32)
# Function, table, and the shape of the updates where it has any.
PROGRAMS = {
    "several elements added": (lambda x, i, u: x.at[i, 4:12].add(u), TABLE, (24, 8)),
    "several elements set": (lambda x, i, u: x.at[i, 4:12].set(u), TABLE, (24, 8)),
    "one element added": (lambda x, i, u: x.at[i, 3:4].add(u), TABLE, (24, 1)),
    "one element set": (lambda x, i, u: x.at[i, 3:4].set(u), TABLE, (24, 1)),
    "several of a block": (lambda x, i, u: x.at[i, 4:12, 2:3].add(u), BLOCKS, (24, 8, 1)),
    "one of a block": (lambda x, i, u: x.at[i, 2:3, 4:12].add(u), BLOCKS, (24, 1, 8)),
    "several elements read": (lambda x, i: x[i, 4:12], TABLE, None),
    "one element read": (lambda x, i: x[i, 3:4], TABLE, None),
    "gradient": (jax.grad(lambda x, i: jnp.sum(jnp.sin(x[i, 4:12]))), TABLE, None),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dim", [0, 1])
def test_bytes_and_memory_of_rows_in_part_are_those_compiled(name, dim):
    """XLA gathers a dimension of which it takes several elements, but not all; of one element it asks which device has it."""
    function, table, updates = PROGRAMS[name]
    arguments = (table, ROWS, *([S(updates, jnp.float32)] if updates else []))
    strategy = tuple(8 if d == dim else 1 for d in range(len(table.shape)))
    result = jax.eval_shape(function, *arguments).shape
    plan = shardfn.plan(
        function, *arguments, in_strategy=(strategy, *((1,) * len(x.shape) for x in arguments[1:])),
        out_strategy=(strategy if result == table.shape else (1,) * len(result),), device=jax.devices(),
    )  # fmt: skip
    found = compare(plan, compile_plan(plan))
    assert all(p.bytes_sent == c.bytes_sent for _, p, c in found.kinds)
    memory = dict(found.memory)["together"]
    assert memory.predicted == pytest.approx(memory.compiled, abs=512)
