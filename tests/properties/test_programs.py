"""Random programs under random legal strategies compute what they compute unsharded, and lie as planned."""

import math

import hypothesis
import jax
import numpy as np

import shardfn
from shardfn.mindspore.parallel import layout_of
from tests.properties.apart import Ended, apart
from tests.properties.programs import asked_cuts, assert_near, cases, scalar

XLA = "XLA is wrong by itself"


@hypothesis.given(cases())
def test_sharded_is_unsharded(case):
    try:
        events = apart(outcome, case)
    except Ended:
        if not ends(by_hand, case):
            raise
        events = [f"{XLA}: it ends the process"]
    for event in events:
        hypothesis.event(event)


def ends(function, case):
    """Whether the process does not come back from it."""
    try:
        apart(function, case)
    except Ended:
        return True
    return False


def outcome(case):
    """Plan and run the case, and hold everything against the unsharded program. Returns what is worth counting."""
    program, args, devices = case.program, case.arguments(), case.ask.devices
    plain = program.function(nested=False)
    want = jax.jit(lambda args: (plain(*args), gradients_of(plain, case, args)))(args)

    sharded, plan, ask = planned(case, args)
    for entry, decision in zip(ask.in_strategy or [shardfn.AUTO] * len(args), plan.inputs, strict=True):
        assert_as_asked(entry, decision, len(devices))
    for entry, decision in zip(ask.out_strategy or [shardfn.AUTO] * len(plan.outputs), plan.outputs, strict=True):
        assert_as_asked(entry, decision, len(devices))

    events = [*(step.run.__name__ for step in program.steps), f"{len(devices)} devices", case.derive]
    events += ["a weaker strategy"] if ask is not case.ask else []
    try:
        result = sharded(*args)
        assert_near(result, want[0])
        for array, decision in zip(jax.tree.leaves(result), plan.outputs, strict=True):
            assert_lies_as_planned(array, plan, decision, devices)
        assert_near(derived(sharded, case, ask, args), want[1])
    except (AssertionError, jax.errors.JaxRuntimeError):
        try:
            assert_near(by_hand(case), want)
        except (AssertionError, jax.errors.JaxRuntimeError):
            return [*events, f"{XLA}: values or a compiler error"]
        raise
    return events


def planned(case, args):
    """The sharded function, its plan, and what was asked: less, where cuts could not stand together."""
    ask, function = case.ask, case.program.function()
    sharded = shardfn.shard(function, **ask.options())
    try:
        return sharded, sharded.plan(*args), ask
    except shardfn.errors.StrategyError as error:
        assert all("hold together" in p.what for p in error.problems), error
    ask = ask.weaker()
    sharded = shardfn.shard(function, **ask.options())
    return sharded, sharded.plan(*args), ask


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


def by_hand(case):
    """Values and gradients by `jax.jit` with the plan's shardings, and by nothing else of this library.

    What goes wrong here as well is XLA's fault.
    """
    args = case.arguments()
    _, plan, _ = planned(case, args)
    function = case.program.function(nested=False)
    ins = plan.in_shardings
    laid = jax.jit(function, in_shardings=ins, out_shardings=plan.out_shardings)
    if case.derive == "shard of grad":
        derive = jax.jit(lambda *args: gradients_of(function, case, args), in_shardings=ins)
    else:
        derive = jax.jit(lambda *args: gradients_of(laid, case, args))
    return laid(*args), derive(*args)


# What the plan says


def assert_as_asked(entry, decision, devices):
    cuts = asked_cuts(entry, decision.shape, devices)
    if cuts is not None:
        assert (decision.strategy, decision.source) == (cuts, "you")
    assert devices % math.prod(decision.strategy) == 0
    assert all(n % c == 0 for n, c in zip(decision.shape, decision.strategy, strict=True))


def assert_lies_as_planned(array, plan, decision, devices):
    """Every device holds the slice that the plan's layout gives its rank."""
    assert array.sharding.shard_shape(array.shape) == decision.local_shape
    layout = layout_of(plan, decision.path)
    held = {shard.device.id: shard for shard in array.addressable_shards}
    assert set(held) == set(devices)
    whole = np.asarray(array)
    for rank, slices in zip(layout.rank_list, layout.slices(array.shape), strict=True):
        shard = held[devices[rank]]
        assert [s.indices(n) for s, n in zip(shard.index, array.shape, strict=True)] == [
            s.indices(n) for s, n in zip(slices, array.shape, strict=True)
        ]
        np.testing.assert_array_equal(np.asarray(shard.data), whole[slices])
