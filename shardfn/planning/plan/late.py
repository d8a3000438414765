"""Fields of a dataclass that are worked out when they are first read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def later(make: Callable[[], Any]) -> Any:
    """What stands for the value of a `late` field until it is read. In several instances it is worked out once."""
    return _Later(functools.cache(make))


def read(instance: Any) -> Any:
    """The dataclass, whose late fields are all worked out."""
    for name in [*vars(instance)]:
        getattr(instance, name)
    return instance


def changed(instance: Any, **fields: Any) -> Any:
    """The dataclass with other values of some fields, which may be given as `later`; those of the others wait as they do."""
    made = object.__new__(type(instance))
    vars(made).update(vars(instance) | fields)
    return made


def late(*default: Any) -> Any:
    """A field of a dataclass, frozen or not, that may be given as `later`; with its default, if it has one.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Sum:
    ...     of: tuple[int, ...]
    ...     total: int = late()
    ...     parity: str = late("unknown")
    >>> made = Sum((1, 2), later(lambda: print("adding") or 3))
    >>> made.total, made.total, dataclasses.replace(made, of=()).total, made.parity
    adding
    (3, 3, 3, 'unknown')
    """
    return _Late(default)


class _Later:
    def __init__(self, value: Callable[[], Any]):
        self.value = value


class _Late:
    """The descriptor of a late field. The value is in the instance's `__dict__`, as that of any field."""

    def __init__(self, default: tuple[Any, ...]):
        self.default, self.name = default, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        known = {} if instance is None else vars(instance)  # None where the dataclass asks for the default
        if self.name not in known:
            if not self.default:
                raise AttributeError(self.name)
            return self.default[0]
        value = known[self.name]
        if isinstance(value, _Later):
            value = vars(instance)[self.name] = value.value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value
