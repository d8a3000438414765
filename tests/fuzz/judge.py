"""Sharded against unsharded: values, gradients inside and outside, second derivatives.

Programs are judged in packs: one sharded function for several programs, with one plan and one compilation. For devices that
are not here, the question is whether they compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardfn
from shardfn.compiled import targets
from shardfn.compiled.comparison import compare
from shardfn.compiled.executable import read
from shardfn.cost.devices.chips import Hardware
from shardfn.cost.devices.hardware import resolve
from shardfn.movement.rewrite import with_shifts
from shardfn.runtime.apply import jitted
from tests.fuzz.drawing import OPS
from tests.fuzz.packs import Finding, Pack
from tests.fuzz.programs import Program, loss

RELATIVE, NOISE = 1e-4, 1e-6
"""The relative error that is no rounding, unless noise of the relative size `NOISE` behind each step that rounds makes as much."""


# ---- functions of a pack


def together(programs: Sequence[Program], functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """One function of the arguments of all: a tuple of the results of each."""
    places, start = [], 0
    for program in programs:
        places.append(slice(start, start + len(program.inputs)))
        start += len(program.inputs)

    def pack(*args: Any) -> tuple[Any, ...]:
        return tuple(function(*args[place]) for function, place in zip(functions, places, strict=True))

    return pack


def gradient_arguments(pack: Pack) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the arguments that the loss is differentiated by, and of the program of each."""
    found, place = [], 0
    for number, program in enumerate(pack.programs):
        for x in program.inputs:
            if program.differentiable and x.dtype in ("float32", "complex64"):
                found.append((place, number))
            place += 1
    return tuple(p for p, _ in found), tuple(n for _, n in found)


def of_differentiable(pack: Pack, function: Callable[..., Any]) -> Callable[..., Any]:
    """The loss over the results of the programs that have a gradient."""

    def chosen(*args: Any) -> Any:
        return [y for y, p in zip(function(*args), pack.programs, strict=True) if p.differentiable]

    return loss(chosen)


def derivative(pack: Pack, function: Callable[..., Any], check: str) -> Callable[..., Any]:
    """The gradient of the loss; of the sum of sines of the gradient where the second is asked for."""
    places, _ = gradient_arguments(pack)
    first = jax.grad(of_differentiable(pack, function), places)
    return jax.grad(loss(first), places) if check == "second" else first


def by_program(pack: Pack, check: str, value: Any) -> list[list[np.ndarray]]:
    """The results of a check, for each program."""
    if check == "values":
        return [[np.asarray(y) for y in jax.tree.leaves(part)] for part in value]
    parts: list[list[np.ndarray]] = [[] for _ in pack.programs]
    for number, array in zip(gradient_arguments(pack)[1], value, strict=True):
        parts[number].append(np.asarray(array))
    return parts


# ---- judgement


def judge(pack: Pack) -> list[Finding]:
    """Every check for every program. What fails is judged again alone, and so are programs of a pack that does not run."""
    if pack.device:
        return judge_compilation(pack)
    args = [a for p in pack.programs for a in p.arguments()]
    plain = together(pack.programs, [p.plain() for p in pack.programs])
    checks = sensible_checks(pack)
    try:
        want = reference(pack, plain, checks, args)
    except Exception as error:
        return alone(pack) if len(pack.programs) > 1 else [Finding(pack, "values", "invalid", line_of(error))]
    findings, function = [], sharded(pack)
    for check in checks:
        only = dataclasses.replace(pack, checks=(check,))
        try:
            got = by_program(pack, check, jax.device_get(checked(pack, check, function)(*args)))
        except Exception as error:
            findings += failed(only, check, error)
            continue
        wrong = [i for i in range(len(got)) if differ(want[check][i], got[i])]
        for i, program in enumerate(pack.programs):
            if i not in wrong:
                findings.append(Finding(dataclasses.replace(only, programs=(program,)), check, "right"))
            elif len(pack.programs) > 1:
                single = judge(dataclasses.replace(only, programs=(program,)))
                findings += single if single[0].verdict != "right" else confirmed(only, check, want[check], got, i)
            else:
                findings += confirmed(only, check, want[check], got, 0)
    return findings


def judge_compilation(pack: Pack) -> list[Finding]:
    """Whether every check compiles. A pack that does is one finding."""
    findings = []
    for check in sensible_checks(pack):
        only = dataclasses.replace(pack, checks=(check,))
        try:
            findings.append(Finding(only, check, "right", as_predicted=compiled(only, check)))
        except Exception as error:
            if len(pack.programs) > 1 or compiles_unsharded(only):
                findings += failed(only, check, error)
            else:
                findings.append(Finding(only, check, "invalid", line_of(error)))
    return findings


def compiles_unsharded(pack: Pack) -> bool:
    try:
        unsharded(pack)
        return True
    except Exception:
        return False


def sensible_checks(pack: Pack) -> list[str]:
    """The checks of a pack; no gradients where no program has one."""
    return [c for c in pack.checks if c == "values" or gradient_arguments(pack)[0]]


def failed(pack: Pack, check: str, error: Exception) -> list[Finding]:
    """What became of a check that raised: of each program alone, and of all together where each alone is right."""
    found = alone(pack) if len(pack.programs) > 1 else []
    if all(f.verdict in ("right", "unsure") for f in found):
        found.append(Finding(pack, check, *failure(error)))
    return found


def alone(pack: Pack) -> list[Finding]:
    return [f for p in pack.programs for f in judge(dataclasses.replace(pack, programs=(p,)))]


def failure(error: Exception) -> tuple[str, str]:
    return "refused" if isinstance(error, shardfn.ShardError) else "crashed", line_of(error)


def line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def reference(pack: Pack, plain: Callable[..., Any], checks: Sequence[str], args: Sequence[Any]) -> dict[str, Any]:
    """The checks on one device, compiled as one function."""

    def everything(*args: Any) -> Any:
        found: dict[str, Any] = {"values": plain(*args)}
        if {"inside", "outside"} & set(checks):
            found["inside"] = derivative(pack, plain, "inside")(*args)
        if "second" in checks:
            found["second"] = derivative(pack, plain, "second")(*args)
        return found

    made = jax.device_get(jax.jit(everything)(*args))
    made["outside"] = made.get("inside")
    return {c: by_program(pack, c, made[c]) for c in checks}


def unsharded(pack: Pack) -> None:
    """Compile all checks for one device, and run them if it is here."""
    plain = together(pack.programs, [p.plain() for p in pack.programs])
    if pack.device:
        one = jax.sharding.SingleDeviceSharding(devices(pack).devices[0])
        for check in sensible_checks(pack):
            target = plain if check == "values" else derivative(pack, plain, check)
            compiled_for(pack, jax.jit(target, in_shardings=one).lower(*shapes(pack)))
    else:
        reference(pack, plain, sensible_checks(pack), [a for p in pack.programs for a in p.arguments()])


def devices(pack: Pack) -> Any:
    """The devices of a pack, as `shard` takes them."""
    return for_compiler(pack.device) if pack.device else jax.devices()[: pack.devices]


@functools.cache
def for_compiler(name: str) -> Hardware:
    """Hardware by its name, with devices that can be compiled for, and nothing else."""
    found = resolve(name)
    return dataclasses.replace(found, devices=tuple(targets.devices(targets.target(found))[: found.count]))


def shapes(pack: Pack) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for p in pack.programs for x in p.inputs]


def compiled_for(pack: Pack, lowered: Any) -> Any:
    return targets.compiled_for(resolve(pack.device).platform, lowered)[0]


def compiled(pack: Pack, check: str) -> bool | None:
    """Compile a check for the devices of a pack, and say whether it sends as many bytes as predicted; None for gradients
    from outside, of which nothing is predicted.
    """
    function = checked(pack, check, sharded(pack))
    if check == "outside":
        compiled_for(pack, function.lower(*shapes(pack)))
        return None
    plan = function.plan(*shapes(pack))
    made = compiled_for(pack, jitted(plan).lower(*shapes(pack)))
    return all(p.bytes_sent == c.bytes_sent for _, p, c in compare(plan, read(made)).kinds)


def sharded(pack: Pack) -> Callable[..., Any]:
    """The sharded function of a pack."""
    function = together(pack.programs, [p.function() for p in pack.programs])
    return shardfn.shard(function, pack.strategies(), pack.out_strategy(), device=devices(pack), budget="fast")


def checked(pack: Pack, check: str, function: Any) -> Any:
    """What a check calls or compiles, for the sharded function of a pack."""
    if check == "values":
        return function
    if check == "outside":
        return jax.jit(derivative(pack, function, check))
    inner = together(pack.programs, [p.function() for p in pack.programs])
    return shardfn.shard(derivative(pack, inner, check), pack.strategies(), device=devices(pack), budget="fast")


def differ(want: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> bool:
    """Whether results of one program differ by more than rounding usually does."""
    return any(bool(excess(w, g, RELATIVE, 0.0).any()) for w, g in zip(want, got, strict=True))


def excess(want: np.ndarray, got: np.ndarray, relative: float, spread: Any) -> np.ndarray:
    """Which elements differ by more than a relative error, one of the array's usual size, and a spread."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return np.ones(1, bool)
    if want.dtype.kind not in "fc":
        return (want != got) & (np.asarray(spread) == 0)
    with np.errstate(all="ignore"):
        size = np.abs(want[np.isfinite(want)])
        usual = min(float(np.median(size)) if size.size else 0.0, 1e6) + 1e-1
        bound = relative * np.abs(want) + relative * usual + 5 * np.asarray(spread)
        same = (want == got) | (np.isnan(want) & np.isnan(got))
        return ~same & ~(np.abs(want - got) <= bound)


def confirmed(pack: Pack, check: str, want: Any, got: Any, number: int) -> list[Finding]:
    """A difference is wrong if it is larger than what noise of a millionth, behind every step that rounds, can make of it.

    The loss, of which the derivatives are taken, rounds too: there the results get noise.
    """
    spreads = [np.zeros(w.shape) for w in want[number]]
    program = pack.programs[number]
    rounding = {step.kind for step in program.steps if OPS[step.kind].rounds}
    small = Pack((program,), pack.devices)

    @jax.jit
    def noisy(seed: Any, *args: Any) -> Any:
        noise = noise_of(seed)
        plain = program.plain(noise=noise, noisy=rounding)
        of_loss = plain if check == "values" else lambda *args: noise(plain(*args), len(program.steps))
        return target_of(small, check, of_loss)(*args)

    for seed in range(6) if rounding or check != "values" else ():
        made = by_program(small, check, jax.device_get(noisy(seed, *program.arguments())))[0]
        for spread, w, m in zip(spreads, want[number], made, strict=True):
            with np.errstate(all="ignore"):
                if w.dtype.kind in "fc":
                    away = np.abs(w - m)
                    away = np.where((w == m) | (np.isnan(w) & np.isnan(m)), 0, np.where(np.isnan(away), np.inf, away))
                else:
                    away = np.where(w == m, 0.0, np.inf)
                np.maximum(spread, away, out=spread)
    eager = by_program(
        small, check, jax.device_get(target_of(small, check, program.plain())(*map(jnp.asarray, program.arguments())))
    )[0]
    if differ(want[number], eager):
        return [Finding(pack, check, "invalid", "jax.jit on one device differs from op by op")]
    texts = []
    for k, (w, g, spread) in enumerate(zip(want[number], got[number], spreads, strict=True)):
        bad = excess(w, g, RELATIVE, spread)
        if check != "values" and w.shape == g.shape:
            bad &= np.isfinite(w)
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.shape == w.shape else ()
            texts.append(f"{bad.sum()} of {w.size} elements of array {k}, first at {first}: {g[first]}, not {w[first]}"
                         if bad.shape == w.shape else f"array {k}: {g.dtype}{g.shape}, not {w.dtype}{w.shape}")  # fmt: skip
    if texts and is_rounded_by_fusion(small, check, want[number]):
        return [
            Finding(
                pack, check, "unsure", "as shifts on one device, jax.jit differs from op by op; " + "; ".join(texts)
            )
        ]
    if texts and is_as_near_to_float64(small, check, want[number], got[number]):
        return [Finding(pack, check, "unsure", "as near to float64 as on one device; " + "; ".join(texts))]
    return [Finding(pack, check, "wrong" if texts else "unsure", "; ".join(texts))]


def is_as_near_to_float64(pack: Pack, check: str, want: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> bool:
    """Whether nothing is farther from the results in float64 than twice the farthest element on one device: a step that cancels
    rounds more than a millionth.
    """
    (program,) = pack.programs
    wide = {"float32": "float64", "complex64": "complex128"}
    with jax.enable_x64(True):
        args = [x.astype(wide.get(str(x.dtype), x.dtype)) for x in program.arguments()]
        exact = by_program(pack, check, jax.device_get(jax.jit(target_of(pack, check, program.plain()))(*args)))[0]

    def away(one: np.ndarray, other: np.ndarray) -> float:
        with np.errstate(all="ignore"):
            return float(np.max(np.where(np.isfinite(other), np.abs(one - other), 0), initial=0))

    return all(
        w.shape == g.shape == e.shape and (np.array_equal(w, g) if w.dtype.kind not in "fc" else away(g, e) <= 2 * away(w, e))
        for w, g, e in zip(want, got, exact, strict=True)
    )  # fmt: skip


def is_rounded_by_fusion(pack: Pack, check: str, want: Sequence[np.ndarray]) -> bool:
    """Whether the program as shifts is right op by op and differs when it is compiled for one device: a value that XLA computes
    twice, rounded otherwise, is not equal to itself, as the gradients of maxima expect it to be.
    """
    (program,) = pack.programs
    shifts = with_shifts(target_of(pack, check, program.plain()))
    args = [*map(jnp.asarray, program.arguments())]
    eager, made = (by_program(pack, check, jax.device_get(f(*args)))[0] for f in (shifts, jax.jit(shifts)))
    return not differ(want, eager) and differ(want, made)


def target_of(pack: Pack, check: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What a check looks at, of a pack of one program."""
    packed = together(pack.programs, [function])
    return packed if check == "values" else derivative(pack, packed, check)


def noise_of(seed: Any) -> Callable[[Any, int], Any]:
    """What multiplies floats by one and a random millionth."""

    def noise(tree: Any, place: int) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), place)

        def one(y: Any) -> Any:
            inexact = jnp.issubdtype(y.dtype, jnp.inexact)
            return y * (1 + NOISE * jax.random.normal(key, y.shape)) if inexact else y

        return jax.tree.map(one, tree)

    return noise


def without_library(pack: Pack, check: str) -> str:
    """Whether `jax.jit` with the plan's shardings of the arguments, and nothing of the library, is "right", "wrong" or fails."""
    args = [a for p in pack.programs for a in p.arguments()]
    plain = together(pack.programs, [p.plain() for p in pack.programs])
    target = plain if check in ("values", "outside") else derivative(pack, plain, check)
    options: dict[str, Any] = {"device": devices(pack), "budget": "fast"}
    plan = shardfn.plan(target, *args, in_strategy=pack.strategies(), **options)
    target = plain if check == "values" else derivative(pack, plain, check)
    if pack.device:
        compiled_for(pack, jax.jit(target, in_shardings=plan.in_shardings).lower(*args))
        return "right"
    got = by_program(pack, check, jax.device_get(jax.jit(target, in_shardings=plan.in_shardings)(*args)))
    want = reference(pack, plain, [check], args)[check]
    return "wrong" if any(differ(w, g) for w, g in zip(want, got, strict=True)) else "right"
