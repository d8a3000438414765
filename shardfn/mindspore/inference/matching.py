"""Find the weights in a training checkpoint by name or by a suffix of it, not the optimizer's copies of them."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from shardfn.checkpoint.contents import KEY, StoredArray
from shardfn.checkpoint.reader import family
from shardfn.errors import CheckpointError, Problem, fail, raise_problems
from shardfn.frontend.paths import listed, tidy
from shardfn.mindspore.inference.weights import Weights

USUAL = ("params", "model")
"""Where training states keep the weights, if the function calls them something else."""


def matched(
    stored: Mapping[str, StoredArray], weights: Weights, strict: bool, text: str, valued: Sequence[str] = ()
) -> dict[str, str]:
    """The stored path of each weight.

    Args:
      stored: what the checkpoint holds.
      weights: what is wanted.
      strict: names and dtypes must be equal, and nothing may be missing.
      text: what the checkpoint is.
      valued: weights that may be missing, for they have a value.

    Raises:
      CheckpointError: weights that are missing, of another shape or dtype, all of them; several places that fit as well.
    """
    spelt = {tidy(path): path for path in stored}
    wanted = {tidy(name): name for name in weights.shapes}
    root = _root(spelt, wanted, stored, weights, strict, text)
    found, problems = {}, []
    for short_name, name in wanted.items():
        path = spelt.get(f"{root}/{short_name}" if root else short_name)
        if path is None:
            if strict or name not in valued:
                problems.append(Problem(f"{text} has no `{name}`", where=f"{name}: {_said(weights, name)}",
                                        why=f"it holds {listed(list(stored))}",
                                        fix='name_map={"stored/name": "name"} says what it is called there'))  # fmt: skip
        elif problem := _misfit(stored[path], weights, name, strict):
            problems.append(problem)
        else:
            found[name] = path
    raise_problems(problems, CheckpointError)
    if not found:
        fail(CheckpointError, f"{text} has none of the weights", where=listed(list(weights.shapes)),
             why=f"it holds {listed(list(stored))}",
             fix='name_map={"stored/name": "name"} says what they are called there')  # fmt: skip
    return found


def _root(
    spelt: Mapping[str, str], wanted: Mapping[str, str], stored: Mapping[str, StoredArray], weights: Weights,
    strict: bool, text: str,
) -> str:  # fmt: skip
    """What stands before the names: the one under which most weights are found."""
    hits: collections.Counter[str] = collections.Counter()
    for path in spelt:
        parts = path.split("/")
        for n in range(len(parts)):
            name = wanted.get("/".join(parts[n:]))
            if name is not None:
                hits["/".join(parts[:n])] += 2 + (stored[spelt[path]].shape == weights.shapes[name].shape)
    own = weights.arguments if len(weights.arguments) == 1 else ()
    first = ("", *own, *(() if strict else USUAL))
    if strict:
        hits = collections.Counter({root: n for root, n in hits.items() if root in first})
    best = [root for root, n in hits.items() if n == max(hits.values())]
    if (usual := next((root for root in first if root in best or not best), None)) is not None:
        return usual
    depth = min(root.count("/") for root in best)
    nearest = [root for root in best if root.count("/") == depth]
    if len(nearest) > 1:
        fail(CheckpointError, f"{text} holds the weights several times", where=f"under {', '.join(f'`{r}`' for r in nearest)}",
             why="all of them fit", fix=f'say which: name_map={{{nearest[0]!r}: "params"}}')  # fmt: skip
    return nearest[0]


def _said(weights: Weights, name: str) -> str:
    shape = weights.shapes[name]
    return f"{shape.dtype}{list(shape.shape)}"


def _misfit(entry: StoredArray, weights: Weights, name: str, strict: bool) -> Problem | None:
    shape, kind = weights.shapes[name].shape, weights.shapes[name].dtype
    is_key = entry.kind.startswith(KEY)
    of_type = f"`{name}` is {entry.dtype} in the checkpoint, and {kind} is wanted"
    if is_key != jnp.issubdtype(kind, jax.dtypes.prng_key):
        return Problem(f"`{name}` is {'a PRNG key' if is_key else entry.dtype} in the checkpoint", where=entry.text,
                       why=f"the function takes {kind}", fix="correct the name with name_map")  # fmt: skip
    if is_key:
        return None
    if entry.shape != shape:
        return Problem(f"`{name}` has the shape {entry.shape} in the checkpoint, and {shape} is wanted", where=entry.text,
                       why="a shape is never changed while it is read", fix="use the sizes of the training run")  # fmt: skip
    if strict and entry.numpy_dtype != kind:
        return Problem(of_type, where=entry.text, why="strict_load casts nothing", fix="leave strict_load out")
    if family(entry.numpy_dtype) != family(kind):
        return Problem(of_type, where=entry.text, why="only floats are cast to floats, ints to ints",
                       fix="convert it before it is saved")  # fmt: skip
    return None
