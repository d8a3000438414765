"""What a sharded function keeps of its calls: by the kind of the call, and for each kind by what the call read (`Watch`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from shardfn.errors import warn
from shardfn.frontend.watch import Watch

MAX_ENTRIES = 128
"""Plans with their executables that one function keeps; the least recently used goes first."""

MANY_VARIANTS = 8
"""Entries of one kind from which on it is said what differs between their calls."""


class Watched(Protocol):
    """What is kept: it fits the calls of a kind that would read the same."""

    @property
    def watch(self) -> Watch:
        """What a call read when it was traced."""
        ...


E = TypeVar("E", bound=Watched)


class Entries(Generic[E]):
    """Up to `MAX_ENTRIES` entries, the most recently used of each kind first."""

    def __init__(self) -> None:
        self._kinds: dict[Any, tuple[E, ...]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    @property
    def kinds(self) -> int:
        """How many kinds of calls there are."""
        return len(self._kinds)

    def __iter__(self) -> Iterator[tuple[Any, E]]:
        return ((key, entry) for key, entries in list(self._kinds.items()) for entry in entries)

    def find(self, key: Any, root: Any) -> E | None:
        """The entry of a call.

        Args:
          key: its kind.
          root: what it belongs to (`Callee.root`).
        """
        entries = self._kinds.get(key, ())
        for i, entry in enumerate(entries):
            if entry.watch.holds(root):
                if i:
                    self._kinds[key] = (entry, *entries[:i], *entries[i + 1 :])
                if len(self._kinds) > MAX_ENTRIES // 2 and (found := self._kinds.pop(key, None)):
                    self._kinds[key] = found  # near the bound recency matters
                return entry
        return None

    def keep(self, key: Any, entry: E, root: Any) -> E:
        """Keep the entry of a call, in the place of the one that it has. Arguments as of `find`."""
        others = tuple(other for other in self._kinds.get(key, ()) if not other.watch.holds(root))
        while len(self) >= MAX_ENTRIES and (others or self._kinds):
            oldest = next(iter(self._kinds))
            left = self._kinds.pop(oldest)[:-1]
            if oldest == key:
                others = left
            elif left:
                self._kinds = {oldest: left, **self._kinds}
        self._kinds[key] = (entry, *others)
        return entry

    def warn_of_variants(self, key: Any, name: str, root: Any) -> None:
        """Say once what differs from call to call, where each difference is planned anew."""
        entries = self._kinds.get(key, ())
        if len(entries) == MANY_VARIANTS:
            what = entries[-1].watch.differing(root) or "what it reads"
            warn(
                f"`{name}` was traced and planned {MANY_VARIANTS} times because {what} changes between calls; "
                "pass what changes often as an array, or keep it in the object as a JAX array"
            )

    def clear(self) -> None:
        """Forget all."""
        self._kinds.clear()
