"""A price or a message that is not a number is an error, before it excludes labels or becomes a bound.

The solver looks where that costs nothing. With the environment variable `SHARDFN_DEBUG_NANS=1` it looks at all messages of
each pass, and so names the first that is not a number.
"""

from __future__ import annotations

import os

import numpy as np

from shardfn.solver.labelling import Array

DEBUG_NANS = os.environ.get("SHARDFN_DEBUG_NANS", "") not in ("", "0")


def check_numbers(values: Array, what: str) -> None:
    """An error where one of `values` is NaN; infinite ones are numbers here.

    Raises:
      FloatingPointError: one is.

    >>> check_numbers(np.array([1.0, np.inf]), "a message")
    """
    if np.isnan(values).any():
        raise FloatingPointError(
            f"{what} is not a number ({int(np.isnan(values).sum())} of {values.size}): please report this, "
            "with what you get under SHARDFN_DEBUG_NANS=1"
        )
