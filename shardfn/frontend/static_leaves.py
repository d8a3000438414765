"""Static leaves of a pytree: those that are not arrays, such as the activation function of a module.

`hide_static` puts them into the structure of the tree, where `jax.jit` compares them, and `restore_static` takes them out again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import tree_util

from shardfn.frontend.plain_objects import hashed
from shardfn.frontend.strategy import is_cell, shape_of


@tree_util.register_static
class StaticLeaf:
    """A leaf that is part of the structure of its tree."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, StaticLeaf):
            return False
        return self.value is other.value or bool(hashed(self.value) == hashed(other.value))

    def __hash__(self) -> int:
        return hash(hashed(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def hide_static(tree: Any) -> Any:
    """A tree with its static leaves in its structure; a tree that is one leaf stays what it is.

    Static leaves are functions, what is not an array in an object of a registered class, and all but arrays in an Equinox module.
    A `Cell` holds arrays and is none of these.

    >>> jax.tree.leaves(hide_static({"w": 1.0, "activation": jax.nn.relu}))
    [1.0]

    None has no leaves, here as in every pytree: it stays.
    """
    leaves = tree_util.tree_leaves(tree)
    if all(isinstance(leaf, _ARRAYS) for leaf in leaves) or tree_util.all_leaves([tree]):
        return tree
    return _hide(tree, _is_function)


def restore_static(tree: Any) -> Any:
    """A tree with its static leaves in their places again."""
    return tree_util.tree_map(
        lambda node: node.value if isinstance(node, StaticLeaf) else node,
        tree,
        is_leaf=lambda node: isinstance(node, StaticLeaf),
    )


def holds_static(tree: Any) -> bool:
    """Whether a tree has static leaves in its structure."""
    nodes = tree_util.tree_leaves(tree, is_leaf=lambda node: isinstance(node, StaticLeaf))
    return any(isinstance(node, StaticLeaf) for node in nodes)


def without_static(tree: Any) -> Any:
    """A tree with None in the place of static leaves, as `eqx.filter` leaves them."""
    return tree_util.tree_map(
        lambda node: None if isinstance(node, StaticLeaf) else node,
        tree,
        is_leaf=lambda node: isinstance(node, StaticLeaf),
    )


def objects_in(structure: Any) -> Iterator[Any]:
    """What the nodes of a tree structure hold beside their children: static leaves, and a registered class's own data.

    >>> list(objects_in(jax.tree.structure(hide_static({"w": 1.0, "n": "text", "f": len}))))
    [<built-in function len>]
    """
    data = structure.node_data()
    todo = [] if data is None or data[0] is dict else [data[1]]
    while todo:
        value = todo.pop()
        if isinstance(value, tuple):
            todo += value
        elif isinstance(value, StaticLeaf):
            yield value.value
        else:
            yield value
    for child in structure.children():
        yield from objects_in(child)


def _hide(tree: Any, is_static: Callable[[Any], bool]) -> Any:
    """`hide_static`, of a part of a tree."""
    if tree is None:
        return tree
    parts, treedef = tree_util.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if tree_util.treedef_is_leaf(treedef):
        return StaticLeaf(tree) if is_static(tree) else tree
    if not isinstance(tree, list | tuple | dict | None):
        is_static = _is_other_than_array if _is_equinox(tree) else _is_no_value
    return treedef.unflatten([_hide(part, is_static) for part in parts])


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def _is_function(leaf: Any) -> bool:
    return callable(leaf) and shape_of(leaf) is None and not is_cell(leaf)


def _is_no_value(leaf: Any) -> bool:
    """Whether a leaf holds no array and is no number; an array of a dtype that JAX lacks is an array."""
    return shape_of(leaf) is None and not isinstance(leaf, np.ndarray) and not is_cell(leaf)


def _is_other_than_array(leaf: Any) -> bool:
    return not hasattr(leaf, "shape") and not is_cell(leaf)


def _is_equinox(node: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)
