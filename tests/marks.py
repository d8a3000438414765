"""Cases of parametrised tests that are left to `make slow`."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import pytest


def some_slow(cases: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """The cases for `parametrize`, those in `slow` marked so; of a dict the values, named and chosen by their keys."""
    if isinstance(cases, Mapping):
        return [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in slow)) for name, case in cases.items()]
    return [pytest.param(case, marks=[pytest.mark.slow] * (case in slow)) for case in cases]
