"""What a test holds of an error whose full text is not in a golden file: its type and the places that it names."""

import re

import pytest

from shardfn.errors import ShardError


def told(error: ShardError) -> str:
    """The type of an error, and where its problems are: `StrategyError: in_strategy[0], device`."""
    places = dict.fromkeys(re.split(r" = | has |: ", problem.where)[0] for problem in error.problems)
    return f"{type(error).__name__}: {', '.join(places)}"


def refusal(call, *args) -> ShardError:
    """The error that a call raises; each of its problems says what to do."""
    with pytest.raises(ShardError) as caught:
        call(*args)
    assert all(problem.what and problem.fix for problem in caught.value.problems)
    return caught.value
