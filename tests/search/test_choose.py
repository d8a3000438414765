"""What is done to an answer once it is found."""

import jax
import jax.numpy as jnp

import shardfn
from shardfn.search import forget, propagation
from shardfn.search.choose import as_sliced
from shardfn.search.problem import Candidate, objective

S = jax.ShapeDtypeStruct


def looked_up(table, index, x):
    """Each column of `index` is looked up; the batch is cut, so that a whole `index` is sliced before it is read."""
    return sum(table[index[:, i]] for i in range(2)) + x


def test_an_argument_that_is_sliced_before_it_is_read_is_laid_out_so():
    problems = []
    shardfn.register_search("listening", lambda problem: problems.append(problem) or propagation.search(problem))
    try:
        args = S((64, 8), jnp.float32), S((16, 2), jnp.int32), S((16, 8), jnp.float32)
        shardfn.plan(looked_up, *args, device="cpu:8", search_mode="listening", level=2)
    finally:
        forget("listening")
    (problem,) = problems
    axes, whole, batch = (("a", 8),), ((), ()), (("a",), ())
    for specs, wanted in (((whole, whole, batch), batch), ((whole, batch, batch), batch)):
        before = Candidate("", axes, specs, {}, problem.price(axes, specs, {}))
        after = as_sliced(problem, before)
        assert after.specs == (whole, wanted, batch)
        assert objective(after.price, problem) <= objective(before.price, problem)
        assert (after.price.memory.peak < before.price.memory.peak) == (specs[1] == whole)
