"""What methods of a class read of classes: data that they name, and what `super()` gives them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from shardfn.frontend.plain_objects import is_plain, is_users_class

_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__", "__class_getitem__"})


def data_of_class(kind: type) -> list[str]:
    """The class attributes that hold data, its metaclass's too, and that a method of the class names: `type(self).k` and `Net.k`
    are no reads of an object. What only `__init__` and its like name is a counter of instances, say. Likewise its methods that
    Python looks up in the class, as `__getitem__`.

    >>> class Net:
    ...     __module__ = "model"
    ...     k = 2.0
    ...     unused = 3.0
    ...     def __call__(self, x):
    ...         return Net.k * x
    >>> data_of_class(Net)
    ['__call__', 'k']
    """
    data = {name: value for base in _users(kind) for name, value in list(vars(base).items())}
    read = {name for name in data.keys() & named_in(kind) if not (name.startswith("__") or _is_bound(data[name]))}
    return sorted(read | {name for name, value in data.items() if _is_of_operator(name, value)})


def looked_up(kind: type) -> Iterator[tuple[type, list[str]]]:
    """The classes that an object's attributes come from, and what it may read there without naming them as its own attributes:
    methods behind `super()`, and descriptors of users' classes, which may hold values of their objects.

    >>> class Net:
    ...     __module__ = "model"
    ...     def factor(self):
    ...         return 2.0
    >>> class Twice(Net):
    ...     __module__ = "model"
    ...     def factor(self):
    ...         return 2 * super().factor()
    >>> [(base.__name__, names) for base, names in looked_up(Twice)]
    [('Net', ['factor'])]
    """
    named = named_in(kind)
    for base in filter(is_users_class, kind.__mro__):
        is_behind = base is not kind and "super" in named
        rows = [(name, value) for name, value in list(vars(base).items()) if name in named and _is_bound(value)]
        if names := [name for name, value in rows if is_behind or is_plain(value)]:
            yield base, names


def _users(kind: type) -> list[type]:
    """The user's classes that attributes of a class come from, those that count last."""
    bases: tuple[type, ...] = (*kind.__mro__, *type(kind).mro(type(kind)))
    return [base for base in reversed(bases) if is_users_class(base)]


def named_in(kind: type) -> set[str]:
    """The names that the methods of a class and of its bases use."""
    values = ((name, value) for base in _users(kind) for name, value in list(vars(base).items()))
    return {found for name, value in values if name not in _CONSTRUCTORS for found in _names(value)}


def _is_of_operator(name: str, value: Any) -> bool:
    """Whether Python looks a method up in the class itself. Those of attributes and equality are the recorder's at times."""
    is_special = (
        name.startswith("__") and name not in _CONSTRUCTORS and name not in ("__getattribute__", "__eq__", "__hash__")
    )
    return is_special and isinstance(value, types.FunctionType)


def _is_bound(value: Any) -> bool:
    return hasattr(type(value), "__get__")


def _names(value: Any) -> Iterator[str]:
    """The names that the code of a function, a property or a method of a class uses."""
    for name in ("fget", "__func__", "fn", "func", "__wrapped__"):
        if (inner := getattr(value, name, None)) is not None and not isinstance(value, type):
            yield from _names(inner)
    code = getattr(value, "__code__", None)
    todo = [code] if isinstance(code, types.CodeType) else []
    while todo:
        one = todo.pop()
        yield from one.co_names
        todo += [const for const in one.co_consts if isinstance(const, types.CodeType)]
