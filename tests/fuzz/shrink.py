"""Make a failing pack smaller, as long as it fails in the same way: fewer programs and steps, plainer lines, fewer shards."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.packs import Finding, Pack
from tests.fuzz.programs import Input, Program, Step, names_in

TRIES, SECONDS = 120, 90.0


def shrink(
    finding: Finding, judged: Callable[[Pack], Finding], tries: int = TRIES, seconds: float = SECONDS
) -> Finding:
    """The smallest pack found that fails like the finding.

    Args:
      finding: a wrong or crashed one.
      judged: judges a pack with one check.
      tries: how many packs are judged at most.
      seconds: when to stop, in seconds.
    """
    end, seen = time.monotonic() + seconds, set()
    smaller = True
    while smaller:
        smaller = False
        for pack in smaller_packs(finding.pack):
            if pack in seen:
                continue
            if tries <= 0 or time.monotonic() > end:
                return finding
            seen.add(pack)
            tries -= 1
            made = judged(pack)
            if made.verdict == finding.verdict and signature(made.text) == signature(finding.text):
                finding, smaller = made, True
                break
    return finding


def signature(text: str) -> str:
    """What stays the same of an error while its program shrinks."""
    if "elements of array" in text or not text:
        return ""
    words = re.sub(r"0x[0-9a-f]+|%?[\w.-]*\d[\w.-]*|\[[^]]*\]", "#", text.split("\n")[0])
    return re.sub(r"\s+", " ", words)[:60]


def smaller_packs(pack: Pack) -> Iterator[Pack]:
    """Packs that are a little simpler, the largest changes first."""
    if len(pack.programs) > 1:
        half = len(pack.programs) // 2
        for part in (pack.programs[:half], pack.programs[half:]):
            yield dataclasses.replace(pack, programs=part)
        for i in range(len(pack.programs)):
            yield dataclasses.replace(pack, programs=pack.programs[:i] + pack.programs[i + 1 :])
    if any(p.results_as for p in pack.programs):
        yield dataclasses.replace(pack, programs=tuple(dataclasses.replace(p, results_as=()) for p in pack.programs))
    for i, program in enumerate(pack.programs):
        for smaller in smaller_programs(program):
            yield dataclasses.replace(pack, programs=(*pack.programs[:i], smaller, *pack.programs[i + 1 :]))
    if pack.checks[0] == "second":
        yield dataclasses.replace(pack, checks=("inside",))
    if pack.checks[0] in ("inside", "outside"):
        yield dataclasses.replace(pack, checks=("values",))
    for devices in (2, 3, 4, 6) if not pack.device else ():
        if devices < pack.devices and pack.devices % devices == 0:
            yield dataclasses.replace(pack, devices=devices)


def smaller_programs(program: Program) -> Iterator[Program]:
    results = program.results
    if len(results) > 1:
        for name in results:
            yield dataclasses.replace(program, results=(name,)).needed()
    for step in reversed(program.steps[:-1]):  # an earlier value is the result
        yield dataclasses.replace(program, results=(step.name,)).needed()
    for i, step in enumerate(program.steps):  # without a step
        for name in sorted(names_in(step.text)):
            steps = tuple(renamed(s, step.name, name) for j, s in enumerate(program.steps) if j != i)
            left = tuple(name if r == step.name else r for r in results)
            if steps:
                yield dataclasses.replace(program, steps=steps, results=left).needed()
    for i, step in enumerate(program.steps):
        for text in plainer_texts(step.text):
            yield with_step(program, i, text)
    for i, x in enumerate(program.inputs):
        for other in smaller_inputs(x):
            yield dataclasses.replace(program, inputs=(*program.inputs[:i], other, *program.inputs[i + 1 :]))
    for i, step in enumerate(program.steps):
        for text in smaller_numbers(step.text):
            yield with_step(program, i, text)


def with_step(program: Program, place: int, text: str) -> Program:
    step = dataclasses.replace(program.steps[place], text=text)
    return dataclasses.replace(program, steps=(*program.steps[:place], step, *program.steps[place + 1 :])).needed()


def renamed(step: Step, name: str, other: str) -> Step:
    return dataclasses.replace(step, text=re.sub(rf"\b{name}\b", other, step.text))


PLAINER = [
    (r"lax\.fori_loop\(0, \d+, lambda i, u: (.*), (\w+)\)$", r"(lambda u: \1)(\2)"),
    (r"lax\.fori_loop\(0, [3-9], ", "lax.fori_loop(0, 2, "),
    (r"lax\.while_loop\(.*\(lambda u: (.*)\)\(c\[1\]\)\), \(0, (\w+)\)\)\[1\]$", r"(lambda u: \1)(\2)"),
    (r"lax\.cond\(.*> 0, lambda u: (.*), lambda u: .*, (\w+)\)$", r"(lambda u: \1)(\2)"),
    (r"lax\.cond\(.*> 0, lambda u: .*, lambda u: (.*), (\w+)\)$", r"(lambda u: \1)(\2)"),
    (r"(?:jax\.checkpoint|shard)\(lambda u: (.*?)(?:, \(\([\d, ]*\),\))?\)\((\w+)\)$", r"(lambda u: \1)(\2)"),
    (r"lax\.map\(lambda u: (.*), (\w+)\)$", r"jax.vmap(lambda u: \1)(\2)"),
    (r"\(lambda u: (.*)\)\((\w+)\)$", None),
    (r"\((?:2 \* )?(\w+)(?: \+ 1| \* \1)?\)", r"\1"),
    (r"jnp\.ones_like\((\w+)\)", r"\1"),
    (r"2 \* ", ""),
    (r"\.(add|multiply|min|max)\(", ".set("),
    (r"\.set\([^()]*\[[^()]*\]\)$", ".set(2.0)"),
    (r", mode='\w+'", ""),
    (r", \"?reverse=True\"?", ""),
]


def plainer_texts(text: str) -> Iterator[str]:
    for pattern, put in PLAINER:
        found = re.search(pattern, text)
        if not found:
            continue
        if put is None:  # a call of a lambda: its body on the operand
            body, operand = found.groups()
            made = text[: found.start()] + re.sub(r"\bu\b", operand, body) + text[found.end() :]
        else:
            made = re.sub(pattern, put, text, count=1)
        if made != text:
            yield made


def smaller_numbers(text: str) -> Iterator[str]:
    for found in re.finditer(r"(?<![\w.])\d+(?![\w.])", text):
        number = int(found[0])
        for less in dict.fromkeys((0, 1, number // 2, number - 1)):
            divides = text[: found.start()].endswith(("% ", "/ "))
            is_minus = text[: found.start()].endswith("-")
            if max(divides, is_minus) <= less < number:
                yield f"{text[: found.start()]}{less}{text[found.end() :]}"


def smaller_inputs(x: Input) -> Iterator[Input]:
    shards: tuple[Any, ...] = x.strategy or ()
    for dim, n in enumerate(shards):
        if n != 1:
            fewer = [1] if n == "AUTO" else [k for k in range(1, n) if n % k == 0]
            for k in fewer:
                yield dataclasses.replace(x, strategy=(*shards[:dim], k, *shards[dim + 1 :]))
    if x.strategy is None:
        yield dataclasses.replace(x, strategy=(1,) * len(x.shape))
    for dim, n in enumerate(x.shape):
        for size in (8, n // 2):
            k = shards[dim] if shards else 1
            if 0 < size < n and (k == "AUTO" or size % k == 0):
                yield dataclasses.replace(x, shape=(*x.shape[:dim], size, *x.shape[dim + 1 :]))
