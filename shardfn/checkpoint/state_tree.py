"""A pytree as a list of arrays by path, and back: dicts, lists, modules, optimizer state, PRNG keys, numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from shardfn.checkpoint import arrays
from shardfn.checkpoint.contents import BARE, HOST, KEY, NUMBER, orbax_name
from shardfn.errors import CheckpointError, Problem, a, raise_problems
from shardfn.frontend.paths import join
from shardfn.frontend.strategy import is_cell

NUMBERS = (bool, int, float)
"""The types of Python numbers that Orbax has. An `IntEnum` is stored as an int, a NumPy float64 as a float."""

Keys = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One array of a state.

    Attributes:
      path: its path, such as `params/w`.
      keys: its place in the tree.
      value: the array to store, or its shape.
      kind: as in `StoredArray`.
    """

    path: str
    keys: Keys
    value: Any
    kind: str = "array"

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        """The stored dtype."""
        return str(self.value.dtype)


def flatten(state: Any, what: str = "state") -> list[StateLeaf]:
    """The arrays of a pytree by path; `what` names the tree in errors.

    Raises:
      CheckpointError: leaves that are not arrays, two arrays with one path; all at once.

    >>> [(leaf.path, leaf.kind) for leaf in flatten({"w": [np.zeros(2)], "step": 3})]
    [('step', 'number'), ('w/0', 'host')]
    """
    found: dict[str, StateLeaf] = {}
    names: dict[str, str] = {}
    problems: list[Problem] = []
    for key, value in tree_util.tree_flatten_with_path(state)[0]:
        path = join("", key) or BARE
        kind, stored = _stored(value)
        if stored is None:
            fix = "remove it from the tree, or make it a static field"
            if is_cell(value):
                fix = "give its arrays, cell.parameters_dict(); after a restore, cell.with_parameters(arrays) is a cell"
            if isinstance(value, str | bytes):
                encode = ".encode()" if isinstance(value, str) else ""
                fix += f"; or save its bytes, np.frombuffer(text{encode}, np.uint8), and read them back by bytes(array)"
                fix += ".decode()" if isinstance(value, str) else ""
            problems.append(Problem(f"`{path}` is {a(value)}, not an array", where=f"{what} at `{path}`",
                                    why="only arrays, numbers and PRNG keys can be saved", fix=fix))  # fmt: skip
        elif path in found:
            problems.append(Problem(f"two arrays have the path `{path}`", where=what,
                                    why="an array is restored by its path", fix="rename one of them"))  # fmt: skip
        else:
            found[path] = leaf = StateLeaf(path, tuple(map(_key, key)), stored, kind)
            if (other := names.setdefault(orbax_name(leaf.keys), path)) != path:
                problems.append(Problem(f"Orbax gives `{path}` and `{other}` one name", where=what,
                                        why=f"it joins the parts of a path by dots: {orbax_name(leaf.keys)}",
                                        fix="rename one of them"))  # fmt: skip
    raise_problems(problems, CheckpointError)
    return list(found.values())


def _stored(value: Any) -> tuple[str, Any]:
    """The kind of a leaf and the array to store; None where the leaf is not an array."""
    for number in NUMBERS:
        if isinstance(value, number):
            return NUMBER, np.asarray(number(value))
    if isinstance(value, complex):
        return HOST, np.asarray(complex(value))
    if isinstance(value, np.generic):
        value = np.asarray(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return "", None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if isinstance(value, jax.ShapeDtypeStruct):
            value = jax.eval_shape(jax.random.key_data, value)
            return KEY + _implementation(dtype), value
        return KEY + str(jax.random.key_impl(value)), jax.random.key_data(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUSMm":
        return "", None
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return "array" if isinstance(value, jax.Array) else HOST, value


def check_stored(dtypes: Mapping[str, Any], what: str = "state") -> None:
    """Refuse dtypes that the files do not have.

    Args:
      dtypes: the dtype of each array by its path.
      what: names the tree in errors.

    Raises:
      CheckpointError: arrays of such dtypes, all at once.
    """
    raise_problems(
        [Problem(f"`{path}` has the dtype {dtype}", where=f"{what} at `{path}`", why="the file format does not have it",
                 fix="cast it before saving") for path, dtype in dtypes.items() if not _is_stored(dtype)],
        CheckpointError,
    )  # fmt: skip


def _is_stored(dtype: Any) -> bool:
    """Whether the files have a dtype. NumPy has more, such as structured ones."""
    try:
        known = jnp.dtype(str(dtype))
        return arrays.has_dtype(known) and (jnp.issubdtype(known, np.number) or known == np.bool_)
    except TypeError:
        return False


def _implementation(dtype: Any) -> str:
    """The implementation of a PRNG key dtype, such as `key<fry>`, by the name that `jax.random.key` takes."""
    short = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
    return short.get(str(dtype).removeprefix("key<").removesuffix(">"), "threefry2x32")


def restore_leaf(kind: str, value: Any) -> Any:
    """The leaf of a stored array: a number, a PRNG key, or the array itself."""
    if kind.startswith(KEY):
        return jax.random.wrap_key_data(value, impl=kind.removeprefix(KEY))
    return np.asarray(value).item() if kind == NUMBER else value


def name_of(key: Any) -> str:
    """The name in Orbax's files of the array at a pytree key."""
    return orbax_name(map(_key, key))


def without_attributes_of_lists(state: Any) -> Any:
    """The state, as dicts and lists where a list has an attribute beside its items: an `nnx.List` has an empty one, for which
    Orbax has no place."""
    flat = tree_util.tree_flatten_with_path(state, is_leaf=lambda node: not tree_util.tree_leaves(node))[0]
    lists = {keys[:i] for keys, _ in flat for i, key in enumerate(keys) if isinstance(key, tree_util.SequenceKey)}
    kept = [(keys, v) for keys, v in flat if not keys or keys[:-1] not in lists or _key(keys[-1])[0] == "item"]
    return state if len(kept) == len(flat) else nested({tuple(map(_key, keys)): v for keys, v in kept})


def _key(key: Any) -> tuple[str, str]:
    """A pytree key as plain data: the kind of its container, and its name in it."""
    match key:
        case tree_util.SequenceKey(idx):
            return "item", str(idx)
        case tree_util.DictKey(name):
            return "key", str(name)
        case tree_util.GetAttrKey(name):
            return "field", str(name)
    return "key", str(getattr(key, "key", key))


def nested(values: Mapping[Keys, Any]) -> Any:
    """The tree of values by key: dicts and lists. A module or a named tuple becomes a dict of its fields.

    >>> nested({(("key", "a"), ("item", "0")): 1, (("key", "a"), ("item", "1")): 2})
    {'a': [1, 2]}
    """
    if tuple(values) == ((),):
        return values[()]
    groups: dict[tuple[str, str], dict[Keys, Any]] = {}
    for keys, value in values.items():
        head = keys[0] if keys else ("key", "")
        groups.setdefault(head, {})[keys[1:]] = value
    children = {head: nested(group) for head, group in groups.items()}
    if children and all(kind == "item" for kind, _ in children):
        order = sorted(children, key=lambda head: int(head[1]))
        if [int(name) for _, name in order] == list(range(len(order))):  # otherwise items are missing
            return [children[head] for head in order]
        return {int(name): children[kind, name] for kind, name in order}
    return {name: child for (_, name), child in children.items()}
