"""What went wrong, where, why, and the fix: every message of this library is formatted here.

>>> print(Problem("argument 1 `w1` cannot be sharded 4 ways along dimension 0",
...               where="in_strategy[1] = (4, 1), w1: float32[30, 64]",
...               why="30 is not divisible by 4", fix="use 1, 2, 3, 5, 6, 10, 15 or 30 there"))
argument 1 `w1` cannot be sharded 4 ways along dimension 0
  where: in_strategy[1] = (4, 1), w1: float32[30, 64]
  why:   30 is not divisible by 4
  fix:   use 1, 2, 3, 5, 6, 10, 15 or 30 there
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import jax


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with a call. `is_type` says that a value has the wrong type, not the wrong value."""

    what: str
    where: str = ""
    why: str = ""
    fix: str = ""
    is_type: bool = False

    def __str__(self) -> str:
        rows = [("where", self.where), ("why", self.why), ("fix", self.fix)]
        return "\n".join([self.what, *(f"  {name + ':':<6} {text}" for name, text in rows if text)])


class ShardError(Exception):
    """The base of all errors that a user can correct.

    Every subclass is a `ValueError`, a `TypeError`, a `RuntimeError`, a `NotImplementedError`,
    an `OSError` or an `ImportError` as well.

    Attributes:
      problems: everything that is wrong with the call, each with what, where, why and fix.
    """

    is_folded: ClassVar[bool] = True
    """Whether problems that differ only in the array are shown once."""

    def __init__(self, problems: Problem | Sequence[Problem]):
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        texts = _folded(self.problems) if self.is_folded else map(str, self.problems)
        numbered = (f"{i}. " + text.replace("\n", "\n   ") for i, text in enumerate(texts, 1))
        return "\n".join([f"{len(self.problems)} problems:", *numbered])


class StrategyError(ShardError, ValueError):
    """A strategy that does not fit its function, its shapes or the devices."""


class StrategyTypeError(ShardError, TypeError):
    """A strategy, an option or an argument of the wrong type."""


class LayoutError(ShardError, ValueError):
    """A `Layout` that contradicts itself or the devices."""


class LayoutTypeError(ShardError, TypeError):
    """A `Layout` built from values of the wrong type."""


class DeviceError(ShardError, ValueError):
    """A device that is unknown, or that this machine does not have."""


class ContextError(ShardError, ValueError):
    """A parallel context value that is out of range, or a key that does not exist."""


class ContextTypeError(ShardError, TypeError):
    """A parallel context value of the wrong type."""


class CheckpointError(ShardError, ValueError):
    """A checkpoint that is not there, or that does not fit what is wanted of it."""

    is_folded = False  # what is missing must be found, array by array


class CheckpointFileError(ShardError, OSError):
    """A file of a checkpoint that is damaged, or that could not be written."""

    __str__ = ShardError.__str__  # OSError has one of its own


class ClusterError(ShardError, RuntimeError):
    """A group of processes that cannot start, or whose environment contradicts itself."""


class CheckError(ShardError, RuntimeError):
    """A sharded function whose results or gradients are not those of the unsharded one.

    Attributes:
      result: the comparison of every array, a `CheckResult`. Print it for a table.
    """

    result: Any = None


class ExtraError(ShardError, ImportError):
    """A capability whose packages are not installed."""

    __str__ = ShardError.__str__


class NotAvailableError(ShardError, NotImplementedError):
    """A setting that is known and checked, but whose capability is not built yet."""


ALIKE, NAMED = 3, 3
"""So many problems that differ only in the array they speak of are told once; and how many of the other arrays are named."""


def _folded(problems: Sequence[Problem]) -> list[str]:
    """The problems' texts, those that are alike as the first of them and the names of what else they speak of."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for p in problems:
        groups.setdefault(_kind(p), []).append(p)
    texts = []
    for p in problems:
        first, *others = groups[_kind(p)]
        if len(others) + 1 < ALIKE:
            texts.append(str(p))
        elif p is first:
            own = _NAME.findall(first.what)
            each = (zip(own, _NAME.findall(other.what), strict=True) for other in others)
            names = list(filter(None, (next((b for a, b in pairs if a != b), "") for pairs in each)))
            more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
            texts.append(f"{p}\n  and {len(others)} more like it: {', '.join(names[:NAMED])}{more}")
    return texts


def _kind(p: Problem) -> tuple[str, str]:
    return _NAME.sub("`", p.what), _NAME.sub("`", p.why)


_NAME = re.compile("`[^`]*`")


def a(value: object) -> str:
    """The type of a value with its article.

    >>> a(3), a([3])
    ('an int', 'a list')
    """
    name = {"ArrayImpl": "jax.Array", "NoneType": "None"}.get(type(value).__name__, type(value).__name__)
    return name if name == "None" else f"an {name}" if name == "ndarray" else with_article(name)


def with_article(name: str) -> str:
    """A name with `a` or `an` by its first letter.

    >>> with_article("add"), with_article("dot_general")
    ('an add', 'a dot_general')
    """
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def did_you_mean(close: Iterable[str]) -> str:
    """The fix that offers names; "" without any.

    >>> did_you_mean(["w", "b"])
    "did you mean 'w' or 'b'?"
    """
    names = " or ".join(map(repr, close))
    return f"did you mean {names}?" if names else ""


def nearest(word: object, names: Iterable[str], shown: Iterable[str] = ()) -> str:
    """The fix for a misspelt name: the names that look like it; or else `shown`, or else all names.

    >>> nearest("Leve", ["level", "plan"]), nearest("fast", ["level", "plan"])
    ("did you mean 'level'?", 'use one of level, plan')
    """
    names = list(names)
    return did_you_mean(similar(str(word), names)) or f"use one of {', '.join(shown or names)}"


def similar(word: str, names: Iterable[str]) -> list[str]:
    """Up to three names that look like a word, or with a part that does.

    >>> similar("devcie", ["device", "detail"]), similar("propagate", ["auto", "sharding_propagation"])
    (['device'], ['sharding_propagation'])
    """
    names = list(names)
    return closest(word, names) or [n for n in names if closest(word, n.split("_"), PART_CUTOFF)][:3]


PART_CUTOFF = 0.75
"""How near a word is to a part of a name that it may mean: a part says less than the whole name."""


def closest(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Up to three names that look like a word, in any case: those that are nearer to the best of them than to the cutoff.

    >>> closest("in_strategies", ["in_strategy", "out_strategy"]), closest("W", ["w", "x"])
    (['in_strategy'], ['w'])
    """
    lower: dict[str, list[str]] = {}
    for name in names:
        lower.setdefault(name.lower(), []).append(name)
    found = difflib.get_close_matches(word.lower(), lower, 3, cutoff)
    if word.lower() in lower:
        return lower[word.lower()][:3]
    match = difflib.SequenceMatcher(b=word.lower())
    ratios = []
    for name in found:
        match.set_seq1(name)
        ratios.append(match.ratio())
    near = [name for name, ratio in zip(found, ratios, strict=True) if ratio >= (ratios[0] + cutoff) / 2]
    return [name for one in near for name in lower[one]][:3]


_TYPE_KINDS: dict[type[ShardError], type[ShardError]] = {
    StrategyError: StrategyTypeError, LayoutError: LayoutTypeError, ContextError: ContextTypeError,
}  # fmt: skip


def raise_problems(problems: Iterable[Problem], kind: type[ShardError] = StrategyError) -> None:
    """Raise one error that holds all `problems`; do nothing where there are none.

    Args:
      problems: the problems.
      kind: the class of the error. Where all problems are of types, its counterpart for types is raised, if it has one.
    """
    found = tuple(problems)
    if found:
        raise (_TYPE_KINDS.get(kind, kind) if all(p.is_type for p in found) else kind)(found)


def fail(kind: type[ShardError], what: str, *, where: str = "", why: str = "", fix: str = "") -> NoReturn:
    """Raise `kind` with a single problem."""
    raise kind(Problem(what, where, why, fix))


def with_extra(name: str) -> str:
    """The fix for a package that is not installed: the command that installs shardfn with an extra, as docs/index.md has it.

    >>> with_extra("train")
    'in the root of the shardfn repository: pip install ".[train]"'
    """
    return f'in the root of the shardfn repository: pip install ".[{name}]"'


def warn(text: str) -> None:
    """Warn at the line of the caller's code: the first frame outside this library and JAX, which calls it in a trace.

    Of several processes the first warns: all plan the same.
    """
    if jax.distributed.is_initialized() and jax.process_index() != 0:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "shardfn",
        "jax",
        "contextlib",
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
