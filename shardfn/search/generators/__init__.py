"""Generators of candidates, and the searches that need none.

| module | holds |
|---|---|
| `exact` | the best strategy of every op, for each mesh |
| `equal_blocks` | the best candidates of the program with fewer of its equal blocks |
| `recursive_programming` | the fast search: the devices divided again and again |
| `sharding_propagation` | the given shardings spread op by op |
| `styles` | plans of one parallel style |
| `default_policy` | the answer where nothing is open |

Which search uses which: `GENERATORS` in `search/__init__.py`.
"""

from shardfn.search.generators.styles import BASELINES, STYLES, TENSOR_BASELINES, batch_groups

__all__ = ["BASELINES", "STYLES", "TENSOR_BASELINES", "batch_groups"]
