"""What each primitive makes of values that are moved: one row for each primitive in `RULES`.

A rule takes a `Call` and returns the value of its result, or None: then the primitive is bound to arrays as it stands.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from jax import lax

from shardfn.movement.rules.call import Call, Rule
from shardfn.movement.rules.elements import ELEMENTWISE, custom_jvp_rule, elementwise_rule
from shardfn.movement.rules.indexed import gather_rule, scatter_rule
from shardfn.movement.rules.reductions import along_rule, dot_rule, least, most, reduce_rule
from shardfn.movement.rules.rows import (
    concatenate_rule,
    dynamic_slice_rule,
    dynamic_update_slice_rule,
    pad_rule,
    reverse_rule,
    slice_rule,
    split,
)
from shardfn.movement.rules.shapes import (
    broadcast_rule,
    iota_rule,
    reshape_rule,
    squeeze_rule,
    stack_rule,
    transpose_rule,
    unstack,
)
from shardfn.movement.rules.windows import convolution_rule, greater, less, pooling_rule
from shardfn.movement.values import Value

__all__ = ["RULES", "RULES_OF_MANY", "Call"]

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise_rule),
    "custom_jvp_call": custom_jvp_rule,
    "slice": slice_rule,
    "pad": pad_rule,
    "concatenate": concatenate_rule,
    "rev": reverse_rule,
    "dynamic_slice": dynamic_slice_rule,
    "dynamic_update_slice": dynamic_update_slice_rule,
    "gather": gather_rule,
    "scatter": functools.partial(scatter_rule, None),
    "scatter-add": functools.partial(scatter_rule, operator.add),
    "scatter-sub": functools.partial(scatter_rule, operator.sub),
    "scatter-mul": functools.partial(scatter_rule, operator.mul),
    "scatter-min": functools.partial(scatter_rule, lax.min),
    "scatter-max": functools.partial(scatter_rule, lax.max),
    "transpose": transpose_rule,
    "broadcast_in_dim": broadcast_rule,
    "squeeze": squeeze_rule,
    "stack": stack_rule,
    "reshape": reshape_rule,
    "iota": iota_rule,
    "reduce_sum": functools.partial(reduce_rule, lambda dtype: 0, combine=operator.add),
    "reduce_prod": functools.partial(reduce_rule, lambda dtype: 1, combine=operator.mul),
    "reduce_max": functools.partial(reduce_rule, least, combine=lax.max),
    "reduce_min": functools.partial(reduce_rule, most, combine=lax.min),
    "reduce_and": functools.partial(reduce_rule, lambda dtype: True, combine=operator.and_),
    "reduce_or": functools.partial(reduce_rule, lambda dtype: False, combine=operator.or_),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        functools.partial(along_rule, lambda p: (p["axis"],), True),
    ),
    "sort": functools.partial(along_rule, lambda p: (p["dimension"],), True),
    "dot_general": dot_rule,
    "conv_general_dilated": convolution_rule,
    "reduce_window_sum": functools.partial(pooling_rule, lambda dtype: 0, operator.add),
    "reduce_window_max": functools.partial(pooling_rule, least, greater),
    "reduce_window_min": functools.partial(pooling_rule, most, less),
    **dict.fromkeys(("argmax", "argmin"), functools.partial(along_rule, lambda p: p["axes"], False)),
}
"""By primitive."""
RULES_OF_MANY: dict[str, Callable[[Call], list[Value] | None]] = {"split": split, "unstack": unstack}
"""The same of several results."""
