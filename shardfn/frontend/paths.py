"""Paths of arrays (`params/layers/0/w`) and the one language of globs in which they are named.

`.` and `/` separate alike; a leading `self.` and the first part (the argument's name) may be left out; `*`, `?` and `[...]`
are as in `fnmatch`, and `*` crosses separators; `['a'][0]` is read as `a/0`; the `/value` of a Flax NNX variable may be there
or not. A path itself goes before a glob. Entries of a call and questions about a plan also take an end that no other path has
(`met_by_end`).
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from jax import tree_util

from shardfn.errors import Problem, closest, did_you_mean

_T = TypeVar("_T")


def join(name: str, key: Sequence[Any]) -> str:
    """`name` and a pytree key path as `name/a/0/b`."""
    rest = tree_util.keystr(tuple(key), simple=True, separator="/")
    return "/".join(part for part in (name, rest) if part)


def normal(path: str) -> str:
    """A path as globs are held against it: `.` and `/` separate alike, a leading `self.` is optional.

    >>> normal("self.layers.0.w")
    'layers/0/w'
    """
    return path.replace(".", "/").strip("/").removeprefix("self/")


def tidy(path: str) -> str:
    """A path as people write it: Flax NNX keeps each array as the `value` of a variable.

    >>> tidy("up/kernel/value")
    'up/kernel'
    """
    return path.removesuffix("/value")


def array_paths(name: str, tree: Any) -> list[str]:
    """The paths of a pytree's leaves below `name`, as people write them: of an NNX variable without the `/value`.

    >>> array_paths("params", {"w": 1, "layers": [2, 3]})
    ['params/layers/0', 'params/layers/1', 'params/w']
    """
    keys = [key for key, _ in tree_util.tree_flatten_with_path(tree)[0]]
    paths = [join(name, key) for key in keys]
    is_field = [bool(key) and isinstance(key[-1], tree_util.GetAttrKey) for key in keys]
    bare = without_value(paths) if any(is_field) else paths
    return [one if field else path for path, one, field in zip(paths, bare, is_field, strict=True)]


def without_value(paths: Sequence[str]) -> Sequence[str]:
    """Paths without a `/value` at the end, where it is all that is below its parent: attention has a `value` of its own.

    >>> without_value(["up/kernel/value", "attention/value", "attention/key"])
    ['up/kernel', 'attention/value', 'attention/key']
    """
    if not any(path.endswith("/value") for path in paths):
        return paths
    inside = collections.Counter(path[:end] for path in paths for end in _ends(path))
    return [tidy(path) if inside[tidy(path)] == 1 else path for path in paths]


def _ends(path: str) -> Iterator[int]:
    """Where the separators of a path are: where its parents end."""
    return (match.start() for match in re.finditer("/", path))


def escaped(path: str) -> str:
    """A path as a glob that meets nothing else.

    >>> escaped("params/w[0]*")
    'params/w[[]0][*]'
    """
    return re.sub(r"([*?\[])", r"[\1]", path)


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def near(glob: str, paths: Sequence[str]) -> list[str]:
    """Up to three paths that look like a glob which meets none, with and without their first part; of what holds arrays, the
    glob that meets them.

    >>> near("layers", ["params/layers/0/w", "params/scale"])
    ['layers/*']
    """
    below = f"{normal(glob)}/"
    if any(form.startswith(below) for path in paths for form in (path, _rest(path))):
        return [f"{below}*"]
    if (respelt := _respelt(normal(glob), paths)) and met(respelt, paths)[0]:
        return [respelt]
    return closest(normal(glob), list(dict.fromkeys([*paths, *map(_rest, paths)]))[:2000], 0.4)


def _respelt(glob: str, paths: Sequence[str]) -> str:
    """A glob with each part that no path has as the part of a path that it looks like; wildcards stay.

    >>> _respelt("*/Kernl", ["params/up/kernel"])
    '*/kernel'
    """
    parts = dict.fromkeys(part for path in paths[:2000] for part in path.split("/"))
    mine = [part if part in parts or re.search(r"[*?\[]", part) else closest(part, parts) for part in glob.split("/")]
    return "/".join(part if isinstance(part, str) else part[0] for part in mine) if all(mine) else ""


def met(pattern: str, paths: Sequence[str]) -> tuple[list[int], str]:
    """The positions of the `paths` (as `normal` gives them) that a pattern meets, and it as the glob that met them.

    A glob that meets no whole path is held against paths without their first part, then against what follows `params` in them.

    >>> met("layers[0].*", ["params/layers/0/w", "params/layers/1/w"])
    ([0], 'layers/0/*')
    >>> met("layers/*/w", ["state/params/layers/0/w", "state/opt_state/0/mu/layers/0/w"])
    ([0], 'layers/*/w')
    >>> met("up/kernel", ["m/up/kernel/value", "m/up/bias/value"]), met("up/kernel/value", ["m/up/kernel"])
    (([0], 'up/kernel'), ([0], 'up/kernel'))
    """
    bare = without_value(paths)
    glob = normal(pattern)
    spellings = [glob, normal(_with_subscripts(pattern))]
    if re.search(r"\w[^/]*/value$", spellings[-1]):  # and not `*/value`, which would meet all
        spellings.append(tidy(spellings[-1]))
    for glob in dict.fromkeys(spellings):
        matches = re.compile(fnmatch.translate(glob)).match
        for shorter in (str, _rest, _within_params):
            rows = ((shorter(p), shorter(b)) for p, b in zip(paths, bare, strict=True))
            hits = [
                i for i, (path, one) in enumerate(rows) if path and (matches(path) or (one != path and matches(one)))
            ]
            if hits:
                return hits, glob
    return [], glob


def _within_params(path: str) -> str:
    """The part of a path after `params`, as a training step's parameters are named."""
    return path.partition("/params/")[2]


def _with_subscripts(pattern: str) -> str:
    """`['a'][0]` as parts of a path."""
    return re.sub(r"""\[(['"]?)([\w-]+)\1\]""", r"/\2", pattern)


def met_by_end(pattern: str, paths: Sequence[str]) -> list[int]:
    """The positions of the paths that end in a path without wildcards, which is the shortest form of a path that is unique.

    >>> met_by_end("up.kernel", ["params/model/up/kernel", "params/model/down/kernel"])
    [0]
    """
    end = literal(_with_subscripts(pattern))
    pairs = [*enumerate(zip(paths, without_value(paths), strict=True))] if end else []
    for name in dict.fromkeys((f"/{end}", f"/{tidy(end or '')}")):
        if hits := [i for i, (path, bare) in pairs if path.endswith(name) or bare.endswith(name)]:
            return hits
    return []


def alike(items: Iterable[_T], key: Callable[[_T], Any], least: int = 3) -> list[list[_T]]:
    """Items of one key together where there are at least that many, the others one by one."""
    groups: dict[Any, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [part for same in groups.values() for part in ([same] if len(same) >= least else [[item] for item in same])]


def layer(text: str) -> str:
    """A path or a reason without the numbers that tell one layer from another: `blocks/0/w1`, `Dense_0`, `[0]`.

    >>> layer("params/blocks/3/w1.0"), layer("Dense_2/kernel"), layer("in_strategy[0]['blocks'][3]")
    ('params/blocks/*/w1.0', 'Dense_*/kernel', "in_strategy[*]['blocks'][*]")
    """
    return re.sub(r"(?<=[/_\[])\d+(?=[/\].' ]|$)", "*", text)


def starred(texts: Sequence[str]) -> str:
    """One text for several that differ only in numbers.

    >>> starred(["blocks/0/w1", "blocks/1/w1"])
    'blocks/*/w1'
    """
    words = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(word[0] if len(set(word)) == 1 else "*" for word in words)


def name_of_row(paths: Sequence[str]) -> str:
    """One name for arrays whose paths differ only in numbers, and for the arrays of an optimizer that mirror them.

    >>> name_of_row(["params/0/w", "params/1/w", "state/mu/0/w", "state/mu/1/w"])
    'params/*/w and 1 alike'
    """
    first = [path for path in paths if layer(path) == layer(paths[0])]
    others = len({layer(path) for path in paths}) - 1
    return starred(first) + (f" and {others} alike" if others else "")


def mirrored(arrays: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """For each parameter that other arrays mirror, and for each of these, the parameter's path.

    Arrays mirror parameters, as an optimizer's moments do, where a tree of at least two has the paths and shapes of another one,
    which is an argument, a result, or the `params` of one.

    >>> moments = [(f"state/0/mu/{name}", (4,)) for name in "ab"]
    >>> mirrored([("params/a", (4,)), ("params/b", (4,)), *moments])["state/0/mu/a"]
    'params/a'
    """
    trees: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for path, shape in arrays:
        for at in re.finditer("/", path):
            trees.setdefault(path[: at.start()], set()).add((path[at.end() :], shape))
    equal: dict[Any, list[str]] = {}
    for prefix, tree in trees.items():
        equal.setdefault(frozenset(tree), []).append(prefix)
    found: dict[str, str] = {}
    for tree, prefixes in sorted(equal.items(), key=lambda item: -len(item[0])):
        first = min(prefixes, key=lambda prefix: (prefix.count("/"), not prefix.endswith("/params")))
        if len(tree) > 1 < len(prefixes) and re.fullmatch(r"(result/\d+|[^/]+)(/params)?", first):
            for prefix in prefixes:
                for rest, _ in tree:
                    found.setdefault(f"{prefix}/{rest}", f"{first}/{rest}")
    return found


def unmirrored(hits: Sequence[int], arrays: Sequence[tuple[str, tuple[int, ...]]]) -> list[int]:
    """The one of several arrays that the others mirror, as moments do a parameter; all of them where there is no such.

    >>> arrays = [(f"{tree}/{name}", (4,)) for tree in ("params", "state/mu") for name in "ab"]
    >>> unmirrored([0, 2], arrays), unmirrored([0, 1], arrays)
    ([0], [0, 1])
    """
    if len(hits) > 1:
        copies = mirrored(arrays)
        own = {copies.get(arrays[i][0], arrays[i][0]) for i in hits}
        return [i for i in hits if arrays[i][0] in own] if len(own) == 1 else [*hits]
    return [*hits]


def few(texts: Sequence[str], most: int, least: int = 3) -> str:
    """The first of some names, those of which at least that many differ only in the number of a layer as one.

    >>> few(["b/0/w", "b/1/w", "b/2/w", "x"], 1), few([], 1)
    ('b/*/w and 1 more', '')
    """
    return listed([starred(same) for same in alike(texts, layer, least)], most) if texts else ""


@dataclasses.dataclass(frozen=True)
class Ruled:
    """Which rule speaks of which path, all by their positions."""

    rules: dict[int, int]
    """From path to rule."""
    missing: tuple[int, ...]
    """Rules that meet nothing."""
    clashes: tuple[tuple[int, int, int], ...]
    """(path, rule, rule): two rules say different things of a path, and neither goes before the other."""


def ruled(
    globs: Sequence[str],
    paths: Sequence[str],
    same: Callable[[int, int], bool],
    met: Callable[[str, Sequence[str]], tuple[list[int], str]] = met,
) -> Ruled:
    """Find the rule of each path. A path itself goes before a glob; of two rules that say the same the later one counts.

    Args:
      globs: of the rules, in order.
      paths: as `normal` gives them.
      same: whether two rules, by position, say the same.
      met: what a glob with wildcards meets, as `met` of this module.

    >>> ruled(["*", "params/w"], ["params/w", "params/b"], lambda a, b: False).rules
    {0: 1, 1: 0}
    """
    index: dict[str, list[int]] = {}
    forms = [
        dict.fromkeys((path, _rest(path), bare, _rest(bare)))
        for path, bare in zip(paths, without_value(paths), strict=True)
    ]
    for i, mine in enumerate(forms):
        for form in mine:
            index.setdefault(form, []).append(i)
    found: dict[int, tuple[bool, int]] = {}
    missing, clashes = [], []
    for rule, pattern in enumerate(globs):
        glob = literal(pattern)
        known = index.get(glob, []) if glob is not None else []
        hits = [i for i in known if paths[i] == glob] or known
        if glob is None or not hits:
            hits, glob = met(pattern, paths)
        if not hits:
            missing.append(rule)
        for i in hits:
            exact = glob in forms[i]
            before = found.get(i)
            if before is not None and before[0] == exact and not same(before[1], rule):
                clashes.append((i, before[1], rule))
            if before is None or exact >= before[0]:
                found[i] = (exact, rule)
    return Ruled({i: rule for i, (_, rule) in found.items()}, tuple(missing), tuple(clashes))


def unmet(name: str, globs: Iterable[str], paths: Sequence[str], what: str = "parameter") -> Iterator[Problem]:
    """A problem for each glob of the argument `name` that meets none of the paths.

    >>> [problem.what for problem in unmet("frozen", ["head", "tail"], ["head/w", "head"])]
    ["frozen 'tail' matches no parameter"]
    """
    globs = tuple(globs)
    for glob in globs:
        if not met(glob, paths)[0]:
            close = near(glob, paths)
            yield Problem(f"{name} {glob!r} matches no {what}", f"{name} = {globs!r}", f"the {what}s are {listed(paths)}",
                          did_you_mean(close) or "use a path, or a glob of paths")  # fmt: skip


def _rest(path: str) -> str:
    return path.split("/", 1)[-1]


def literal(pattern: str) -> str | None:
    """The path that a pattern means, if it has no wildcards."""
    if re.search(r"[*?\[]", re.sub(r"\[([*?\[])\]", "", pattern)):
        return None
    return normal(re.sub(r"\[([*?\[])\]", r"\1", pattern))
