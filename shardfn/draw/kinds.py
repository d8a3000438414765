"""The kinds of pictures of a plan."""

from __future__ import annotations

from collections.abc import Callable

from shardfn.draw.arrays import arrays_picture
from shardfn.draw.memory import memory_picture
from shardfn.draw.mesh import mesh_picture
from shardfn.draw.picture import WIDTH, Picture, checked_width
from shardfn.draw.search import search_picture
from shardfn.draw.time import time_picture
from shardfn.errors import StrategyError, StrategyTypeError, a, fail, nearest
from shardfn.planning.plan import Plan


def draw_plan(plan: Plan, kind: str, path: str | None = None, width: float = WIDTH) -> Picture:
    """A picture of a plan.

    Args:
      plan: the plan.
      kind: one of
        "mesh": an array divided into shards, and the shard that each device holds;
        "arrays": each array as a bar with the length of its bytes, its shards coloured by mesh axis;
        "memory": memory over the program against the limit, with the arrays at the peak;
        "time": the modelled time as a bar of compute, memory and each collective, with their source lines;
        "search": the candidates of the search by bytes sent and peak memory.
      path: the array that "mesh" shows; the largest argument by default.
      width: pixels, 320 to 4000.

    Returns:
      The picture: `str` gives the SVG text, a notebook shows it, `.save("plan.svg")` writes it.

    Raises:
      StrategyError: there is no such kind, no such array, or no such width.
      StrategyTypeError: the kind is not a string, or the width not a number.

    >>> import jax, shardfn
    >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
    >>> made = shardfn.plan(lambda x, w: x @ w, x, w, in_strategy=((4, 1), (1, 2)), device="tpu-v5e:2x4")
    >>> for kind in KINDS:
    ...     print(draw_plan(made, kind).title)
    x: float32[8,4]
    Arrays of <lambda>
    Memory of <lambda> on one device
    Modelled time of <lambda>: ...
    Search for <lambda>
    """
    if not isinstance(kind, str):
        fail(StrategyTypeError, f"a kind of picture is a string, not {a(kind)}", where=f"draw({kind!r:.60})",
             why="pictures are chosen by name", fix=f"use one of {', '.join(KINDS)}")  # fmt: skip
    if kind not in KINDS:
        is_pipeline = kind in ("pipeline", "schedule")
        fail(StrategyError, f"a plan has no picture {kind!r}", where=f"draw({kind!r})",
             why=f"its pictures are {', '.join(KINDS)}",
             fix="a pipeline has that picture: pipe.schedule.draw()" if is_pipeline else nearest(kind, KINDS))  # fmt: skip
    if path is not None and kind != "mesh":
        fail(StrategyError, f"the picture {kind!r} shows all arrays, so it takes no path", where=f"draw({kind!r}, {path!r})",
             why='only "mesh" shows a single array', fix=f'leave the path out, or draw("mesh", {path!r})')  # fmt: skip
    return KINDS[kind](plan, path, checked_width(width))


KINDS: dict[str, Callable[[Plan, str | None, float], Picture]] = {
    "mesh": mesh_picture,
    "arrays": lambda plan, _, width: arrays_picture(plan, width),
    "memory": lambda plan, _, width: memory_picture(plan, width),
    "time": lambda plan, _, width: time_picture(plan, width),
    "search": lambda plan, _, width: search_picture(plan, width),
}
"""Each kind and the function that draws it from a plan, a path and a width."""
