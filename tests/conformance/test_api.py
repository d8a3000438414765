"""Arguments of MindSpore's `shard` and `Layout` beside ours."""

import ast

import jax.numpy as jnp
import pytest

import shardfn
from shardfn import ShardError
from tests.conformance import facts
from tests.conformance.deviations import ACCEPTS, Ask, row_of

CASES = facts.load("api_args")


def shard_with(**options):
    return shardfn.shard(lambda x: x + 1, ((1, 1),), **options)(jnp.zeros((2, 2)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_argument(case, tally):
    ask = Ask(case)
    row = row_of(ask)

    def run():
        if case.call is not None:
            return eval(case.call, {"Layout": shardfn.mindspore.Layout})
        return shard_with(**ask.kwargs)

    if row.does == ACCEPTS if row else case.accepted:
        result = run()
        if case.gives is not None:
            assert result.to_dict() == ast.literal_eval(case.gives)
        tally(f"accepted here only: {row}" if row else "accepted alike")
    else:
        with pytest.raises(ShardError) as error:
            run()
        if row is None:
            kind = case.error.split()[0]
            assert isinstance(error.value, {"TypeError": TypeError, "ValueError": ValueError}[kind])
        tally(f"refused here only: {row}" if row else "refused alike, as the same kind of error")
