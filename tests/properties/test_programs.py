"""Random programs under random legal strategies compute what they compute unsharded, and lie as planned."""

import gc
import itertools
import math

import hypothesis
import jax
import numpy as np

import shardfn
from tests.properties.programs import asked_cuts, assert_near, cases, scalar

CALLS = itertools.count(1)


@hypothesis.given(cases())
def test_sharded_is_unsharded(case):
    if next(CALLS) % 50 == 0:  # else a thousand programs stay in memory
        jax.clear_caches()
        gc.collect()
    program, args, devices = case.program, case.arguments(), case.ask.devices
    plain = program.function(nested=False)
    want, want_gradients = jax.jit(lambda args: (plain(*args), gradients_of(plain, case, args)))(args)

    sharded, plan, ask = planned(case, args)
    for entry, decision in zip(ask.in_strategy or [shardfn.AUTO] * len(args), plan.inputs, strict=True):
        assert_as_asked(entry, decision, len(devices))
    for entry, decision in zip(ask.out_strategy or [shardfn.AUTO] * len(plan.outputs), plan.outputs, strict=True):
        assert_as_asked(entry, decision, len(devices))
    for what in (*(step.run.__name__ for step in program.steps), f"{len(devices)} devices"):
        hypothesis.event(what)

    result = checked(lambda: sharded(*args), want, lambda: by_hand(case, plan, want)(*args))
    if result is not None:
        for array, decision in zip(jax.tree.leaves(result), plan.outputs, strict=True):
            assert_lies_as_planned(array, plan, decision, devices)
    checked(lambda: derived(sharded, case, ask, args), want_gradients, lambda: derived_by_hand(case, plan, args, want))


def gradients_of(function, case, args):
    found = jax.grad(lambda args: scalar(function(*args)), allow_int=True)(args)
    return [found[i] for i in case.program.floats]


def derived(sharded, case, ask, args):
    """The gradients, in one of the three ways that a program may take them."""
    if case.derive == "grad":
        return gradients_of(sharded, case, args)
    if case.derive == "jit of grad":
        return jax.jit(lambda args: gradients_of(sharded, case, args))(args)
    options = ask.options() | {"out_strategy": None}
    return shardfn.shard(lambda *args: gradients_of(case.program.function(), case, args), **options)(*args)


def planned(case, args):
    """The sharded function, its plan, and what was asked: less, where cuts could not stand together."""
    ask, function = case.ask, case.program.function()
    sharded = shardfn.shard(function, **ask.options())
    try:
        return sharded, sharded.plan(*args), ask
    except shardfn.errors.StrategyError as error:
        assert all("hold together" in p.what for p in error.problems), error
        hypothesis.event("refused")
    ask = ask.weaker()
    sharded = shardfn.shard(function, **ask.options())
    return sharded, sharded.plan(*args), ask


# XLA's own faults: what hand-written shardings get wrong as well is not this library's to answer for.


def checked(run, want, control):
    """The result of `run`, which is `want`; None where XLA gets it wrong by itself."""
    try:
        result = run()
        assert_near(result, want)
        return result
    except (AssertionError, jax.errors.JaxRuntimeError):
        try:
            assert_near(control(), want)
        except (AssertionError, jax.errors.JaxRuntimeError):
            hypothesis.event("XLA is wrong by itself")
            return None
        raise


def by_hand(case, plan, want):
    """`jax.jit` with the plan's shardings, and nothing else of this library."""
    function = case.program.function(nested=False)
    outs = jax.tree.unflatten(jax.tree.structure(want), [plan.sharding(d.path) for d in plan.outputs])
    return jax.jit(function, in_shardings=tuple(plan.sharding(d.path) for d in plan.inputs), out_shardings=outs)


def derived_by_hand(case, plan, args, want):
    if case.derive == "shard of grad":
        function = case.program.function(nested=False)
        ins = tuple(plan.sharding(d.path) for d in plan.inputs)
        return jax.jit(lambda *args: gradients_of(function, case, args), in_shardings=ins)(*args)
    return jax.jit(lambda args: gradients_of(by_hand(case, plan, want), case, args))(args)


# What the plan says


def assert_as_asked(entry, decision, devices):
    cuts = asked_cuts(entry, decision.shape, devices)
    if cuts is not None:
        assert (decision.cuts, decision.source) == (cuts, "you")
    assert devices % math.prod(decision.cuts) == 0
    assert all(n % c == 0 for n, c in zip(decision.shape, decision.cuts, strict=True))


def assert_lies_as_planned(array, plan, decision, devices):
    """Every device holds the slice that the plan's layout gives its rank."""
    assert array.sharding.shard_shape(array.shape) == decision.local_shape
    layout = plan.layout(decision.path)
    held = {shard.device.id: shard for shard in array.addressable_shards}
    assert set(held) == set(devices)
    whole = np.asarray(array)
    for rank, slices in zip(layout.rank_list, layout.slices(array.shape), strict=True):
        shard = held[devices[rank]]
        assert [s.indices(n) for s, n in zip(shard.index, array.shape, strict=True)] == [
            s.indices(n) for s, n in zip(slices, array.shape, strict=True)
        ]
        np.testing.assert_array_equal(np.asarray(shard.data), whole[slices])
