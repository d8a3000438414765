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
    program, ask, devices = case.program, case.ask, case.ask.devices
    args = case.arguments()
    for step in program.steps:
        hypothesis.event(step.run.__name__)
    if next(CALLS) % 50 == 0:  # else a thousand programs stay in memory
        jax.clear_caches()
        gc.collect()

    plain, function = program.function(nested=False), program.function()
    gradient = jax.grad(lambda f, args: scalar(f(*args)), argnums=1, allow_int=True)

    def floats(gradients):
        return [gradients[i] for i in program.floats]

    want, want_gradients = jax.jit(lambda args: (plain(*args), floats(gradient(plain, args))))(args)

    sharded, plan, ask = planned(function, ask, args)
    hypothesis.event(f"{len(devices)} devices")
    for entry, decision in zip(ask.in_strategy or [shardfn.AUTO] * len(args), plan.inputs, strict=True):
        assert_as_asked(entry, decision, len(devices))
    for entry, decision in zip(ask.out_strategy or [shardfn.AUTO] * len(plan.outputs), plan.outputs, strict=True):
        assert_as_asked(entry, decision, len(devices))

    got = sharded(*args)
    assert_near(got, want, "values")
    for result, decision in zip(jax.tree.leaves(got), plan.outputs, strict=True):
        assert_lies_as_planned(result, plan, decision, devices)

    if case.derive == "jit of grad":
        gradients = jax.jit(lambda args: floats(gradient(sharded, args)))(args)
    elif case.derive == "grad":
        gradients = floats(gradient(sharded, args))
    else:
        options = ask.options() | {"out_strategy": None}
        gradients = shardfn.shard(lambda *args: floats(gradient(function, args)), **options)(*args)
    assert_near(gradients, want_gradients, f"gradients by {case.derive}")


def planned(function, ask, args):
    """The sharded function, its plan, and what was asked: less, where cuts could not stand together."""
    sharded = shardfn.shard(function, **ask.options())
    try:
        return sharded, sharded.plan(*args), ask
    except shardfn.errors.StrategyError as error:
        assert all("hold together" in p.what for p in error.problems), error
        hypothesis.event("refused")
    ask = ask.weaker()
    sharded = shardfn.shard(function, **ask.options())
    return sharded, sharded.plan(*args), ask


def assert_as_asked(entry, decision, devices):
    cuts = asked_cuts(entry, decision.shape, devices)
    if cuts is not None:
        assert (decision.cuts, decision.source) == (cuts, "you")
    assert devices % math.prod(decision.cuts) == 0
    assert all(n % c == 0 for n, c in zip(decision.shape, decision.cuts, strict=True))


def assert_lies_as_planned(result, plan, decision, devices):
    """Every device holds the slice that the plan's layout gives its rank."""
    assert result.sharding.shard_shape(result.shape) == decision.local_shape
    layout = plan.layout(decision.path)
    held = {shard.device.id: shard for shard in result.addressable_shards}
    assert set(held) == set(devices)
    whole = np.asarray(result)
    for rank, slices in zip(layout.rank_list, layout.slices(result.shape), strict=True):
        shard = held[devices[rank]]
        assert [s.indices(n) for s, n in zip(shard.index, result.shape, strict=True)] == [
            s.indices(n) for s, n in zip(slices, result.shape, strict=True)
        ]
        np.testing.assert_array_equal(np.asarray(shard.data), whole[slices])
