"""Experts by dispatch and combine equal the dense computation, in value and in all gradients, wherever things are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardfn
from shardfn import experts
from shardfn.errors import DeviceError, StrategyError, StrategyTypeError
from shardfn.mindspore import Layout
from tests.marks import some_slow

RANDOM = np.random.default_rng(0)
WIDTH, HIDDEN, EXPERTS, K = 6, 10, 8, 3


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def arrays(tokens):
    """x, uneven logits that leave expert 3 without tokens, two matrices and a bias for each expert."""
    logits = (2 * normal(tokens, EXPERTS)).at[:, 3].add(-50).at[:, 1].add(3)
    return (
        normal(tokens, WIDTH),
        logits,
        normal(EXPERTS, WIDTH, HIDDEN),
        normal(EXPERTS, HIDDEN),
        normal(EXPERTS, HIDDEN, WIDTH),
    )


def dense(x, logits, up, bias, down, **how):
    """All experts for all tokens, weighted by the routing."""
    routing = experts.route(logits, K, **how)
    hidden = jax.nn.gelu(jnp.einsum("tw,ewh->teh", x, up) + bias)
    each = jnp.einsum("teh,ehw->tew", hidden, down)
    weights = jnp.einsum("tke,tk->te", jax.nn.one_hot(routing.experts, EXPERTS), routing.weights)
    return jnp.einsum("te,tew->tw", weights, each)


def sparse(x, logits, up, bias, down, layout=None, axes=None, alltoall=None, **how):
    sent = experts.dispatch(x, experts.route(logits, K, **how), layout=layout, axes=axes, alltoall=alltoall)
    hidden = jax.nn.gelu(sent.dot(sent.rows, up) + sent.spread(bias))
    return experts.combine(sent.dot(hidden, down), sent)


@functools.cache
def wanted(tokens, **how):
    values = arrays(tokens)
    seeds = normal(tokens, WIDTH)
    both = lambda *a: (dense(*a, **how), jax.grad(lambda *a: (dense(*a, **how) * seeds).sum(), range(5))(*a))  # noqa: E731
    return values, seeds, jax.jit(both)(*values)


def layout_of(sizes, tokens):
    count = int(np.prod(sizes))
    axes = ("a", "b")[: len(sizes)]
    mesh = jax.make_mesh(sizes, axes, (AxisType.Auto,) * len(sizes), devices=jax.devices()[:count])
    return NamedSharding(mesh, PartitionSpec(tokens or None))


# By name: the mesh, the axes of the tokens, the axes of the experts (None: those of the tokens).
PLACES = {
    "one device": ((1,), ("a",), None),
    "2 devices": ((2,), ("a",), None),
    "4 devices": ((4,), ("a",), None),
    "same axis": ((8,), ("a",), None),
    "another axis": ((2, 4), ("a",), "b"),
    "one of two axes": ((2, 4), ("a", "b"), "b"),
    "more axes, in another order": ((2, 4), ("a",), ("b", "a")),
    "replicated tokens": ((4, 2), (), ("a", "b")),
    "replicated experts": ((2, 4), ("a", "b"), ()),
}
ROUTINGS = {"dropless": {}, "capacity": {"capacity_factor": 1.25, "groups": 4}}


def check(tokens, place, alltoall, how):
    values, seeds, (y, gradients) = wanted(tokens, **how)
    sizes, sharded, axes = PLACES[place]
    where = {"layout": layout_of(sizes, sharded), "axes": axes, "alltoall": alltoall}
    run = functools.partial(sparse, **where, **how)
    both = lambda *a: (run(*a), jax.grad(lambda *a: (run(*a) * seeds).sum(), range(5))(*a))  # noqa: E731
    found, own = jax.jit(both)(*values)
    np.testing.assert_allclose(found, y, rtol=1e-4, atol=1e-4)
    for a, b in zip(own, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


QUICK = {
    ("same axis", "dropless", True, 13),
    ("another axis", "dropless", False, 13),
    ("another axis", "capacity", True, 13),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in ((p, r, a, t) for p in PLACES for r in ROUTINGS for a in (True, False) for t in (13, 16))
]


@pytest.mark.parametrize(("place", "routing", "alltoall", "tokens"), CASES)
def test_sharded_experts_equal_the_dense_computation(place, routing, alltoall, tokens):
    check(tokens, place, alltoall, ROUTINGS[routing])


@pytest.mark.parametrize("how", ROUTINGS.values(), ids=ROUTINGS)
def test_unsharded_experts_equal_the_dense_computation(how):
    values, _, (y, _) = wanted(13, **how)
    np.testing.assert_allclose(jax.jit(functools.partial(sparse, **how))(*values), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("routing", some_slow(list(ROUTINGS), ["dropless"]))
def test_eager_gradients_of_tokens_that_do_not_divide_compile_once(routing, caplog):
    values, seeds, (_, gradients) = wanted(13, **ROUTINGS[routing])
    run = functools.partial(sparse, layout=layout_of((8,), ("a",)), **ROUTINGS[routing])
    loss = lambda *a: (run(*a) * seeds).sum()  # noqa: E731
    for a, b in zip(jax.grad(loss, range(5))(*values), gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    with jax.log_compiles():
        jax.grad(loss, range(5))(*values)
    assert len([r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]) < 5


def by_gather(x, out, starts, sizes, landings, received, *, axis_name):
    """`jax.lax.ragged_all_to_all` as its documentation words it, by gathering everything."""
    me, devices = lax.axis_index(axis_name), lax.axis_size(axis_name)
    every = [lax.all_gather(each, axis_name) for each in (x, starts, sizes, landings)]
    slices = len(starts) // devices
    row = jnp.arange(len(out))
    for source in range(devices):
        for i in range(slices):
            x_from, start, size, landing = (each[source] for each in every)
            n = me * slices + i
            at = row - landing[n]
            filled = (at >= 0) & (at < size[n])
            out = jnp.where(filled[:, None], x_from[jnp.clip(start[n] + at, 0, len(x) - 1)], out)
    return out


def test_the_ragged_exchange_equals_the_dense_computation(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", by_gather)
    monkeypatch.setattr(lax, "platform_dependent", lambda x, default, **forms: forms["tpu"](x))
    check(13, "4 devices", True, {})


def test_the_ragged_exchange_lowers_for_tpu_and_gpu():
    values = wanted(16)[0]
    run = jax.jit(functools.partial(sparse, layout=layout_of((8,), ("a",))))
    for platform in ("tpu", "cuda"):
        text = run.trace(*values).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("@ragged_all_to_all") == 2 and "stablehlo.all_to_all" not in text


@pytest.mark.parametrize("alltoall", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_report_counts_what_is_compiled(alltoall):
    x, _, up, bias, down = arrays(32)
    gate = normal(WIDTH, EXPERTS)
    layout = layout_of((8,), ("a",))

    def layer(x, gate, up, bias, down):
        return sparse(x, x @ gate, up, bias, down, layout=layout, alltoall=alltoall, capacity_factor=1.0, groups=8)

    tokens, weights = (8, 1), ((8, 1, 1), (8, 1), (8, 1, 1))
    f = shardfn.shard(layer, in_strategy=(tokens, (1, 1), *weights))
    values = x, gate, up, bias, down
    text = f.lower(*values).compile().as_text() or ""
    kinds = {kind for kind in ("all-to-all", "all-gather", "all-reduce") if re.search(rf" {kind}(-start)?\(", text)}
    predicted = f.plan(*values).collectives
    if alltoall:
        assert kinds == {"all-to-all"} == {c.kind for c in predicted}
        slots = 2  # ceil(1.0 * K * 4 / EXPERTS)
        assert [c.total_bytes for c in predicted] == [EXPERTS * slots * WIDTH * 4 * 7 // 8] * 2
    else:
        assert "all-to-all" not in kinds
    np.testing.assert_allclose(f(*values), dense(x, x @ gate, up, bias, down, capacity_factor=1.0, groups=8),
                               rtol=1e-4, atol=1e-4)  # fmt: skip


def test_route_takes_the_best_experts_and_gives_gradients():
    logits = normal(9, EXPERTS)
    found = experts.route(logits, K, normalize=False)
    best, chosen = lax.top_k(jax.nn.softmax(logits), K)
    np.testing.assert_array_equal(found.experts, chosen)
    np.testing.assert_allclose(found.weights, best, rtol=1e-6)
    np.testing.assert_array_equal(found.load, np.bincount(np.ravel(chosen), minlength=EXPERTS))
    best_of = lambda x: lax.top_k(jax.nn.softmax(x), K)[0]  # noqa: E731
    ways = (lambda x: experts.route(x, K).weights, lambda x: best_of(x) / best_of(x).sum(-1, keepdims=True))
    own, theirs = (jax.grad(lambda x, f=f: (f(x)[:, 1] ** 2).sum())(logits) for f in ways)
    np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-6)


def test_route_drops_by_group_last_choices_first():
    logits = jnp.tile(jnp.array([3.0, 2.0, 1.0, 0.0]), (8, 1))
    found = experts.route(logits, 2, capacity_factor=1.0, groups=2)
    assert found.capacity == 2
    assert found.experts.tolist() == 2 * [[0, 1], [0, 1], [4, 4], [4, 4]]
    assert int(found.dropped) == 8 and found.load.tolist() == [8, 8, 0, 0]
    mixed = experts.route(logits.at[0].set(jnp.array([2.0, 3.0, 1.0, 0.0])), 2, capacity_factor=0.5)
    assert mixed.experts[0].tolist() == [1, 4], "the first choices of others come before its second"


def test_losses_are_those_of_the_papers():
    logits = normal(32, EXPERTS)
    routing = experts.route(logits, 1)
    probabilities = jax.nn.softmax(logits)
    share = np.bincount(np.argmax(logits, -1), minlength=EXPERTS) / 32
    expected = EXPERTS * (share * probabilities.mean(0)).sum()
    np.testing.assert_allclose(experts.load_balance(logits, routing), expected, rtol=1e-5)
    np.testing.assert_allclose(experts.router_z(logits), (jax.nn.logsumexp(logits, -1) ** 2).mean(), rtol=1e-6)


def test_a_layout_of_mindspore_places_the_tokens():
    values, _, (y, _) = wanted(16)
    layout = Layout((2, 4), ("a", "b"))("a", "None")
    np.testing.assert_allclose(jax.jit(functools.partial(sparse, layout=layout, axes="b"))(*values), y, rtol=1e-4, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: experts.route(jnp.ones((4, 3)), 4), StrategyError, "`k` = 4 experts"),
        (lambda: experts.route(jnp.ones((4, 3)), 1, groups=5, capacity_factor=1), StrategyError, "4 tokens in 5 groups"),
        (lambda: experts.route(jnp.ones((4, 3)), 1, capacity_factor=0), StrategyError, "leaves the experts no room"),
        (lambda: experts.dispatch(jnp.ones((5, 2)), experts.route(jnp.ones((4, 3)), 1)), StrategyError, "4 tokens"),
        (lambda: experts.dispatch(jnp.ones((4, 2)), experts.route(jnp.ones((4, 3)), 1), layout=(4, 1)),
         StrategyTypeError, "must be a Layout or a NamedSharding"),
        (lambda: experts.dispatch(jnp.ones((4, 2)), experts.route(jnp.ones((4, 3)), 1), layout=layout_of((4,), ("a",))),
         StrategyError, "3 experts cannot be sharded 4 ways"),
        (lambda: experts.dispatch(jnp.ones((4, 2)), experts.route(jnp.ones((4, 3)), 1), layout=layout_of((4,), ("a",)),
                                  axes="c"), StrategyError, "the mesh has no axis 'c'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_the_report_counts_a_ragged_exchange_as_all_its_rows():
    values = wanted(16)[0]
    layout = layout_of((8,), ("a",))
    weights = ((8, 1, 1), (8, 1), (8, 1, 1))
    plan = shardfn.plan(functools.partial(sparse, layout=layout), *values, in_strategy=((8, 1), (8, 1), *weights),
                        device="tpu-v5e:8")  # fmt: skip
    sent = [c.total_bytes for c in plan.collectives if c.kind == "all-to-all"]
    assert sent == [16 // 8 * K * WIDTH * 4 * 7 // 8] * 2


def test_combine_refuses_results_of_other_rows():
    sent = experts.dispatch(jnp.ones((4, 2)), experts.route(jnp.eye(4, 3), k=1))
    with pytest.raises(StrategyError, match="rows that were dispatched"):
        experts.combine(sent.rows[:2], sent)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, sent: experts.route(x[None], k=1), "[tokens, experts]"),
        (lambda x, sent: sent.spread(jnp.ones((2, 1))), "2 experts"),
        (lambda x, sent: sent.dot(sent.rows, jnp.ones((2, 2, 2))), "2 experts"),
        (lambda x, sent: experts.dispatch(x, sent.routing, axes="data"), "`layout` gives none"),
    ],
)
def test_arrays_and_axes_that_do_not_fit_are_refused(call, says):
    x = jnp.ones((4, 2))
    with pytest.raises(StrategyError, match=re.escape(says)):
        call(x, experts.dispatch(x, experts.route(jnp.eye(4, 3), k=1)))


def test_load_is_that_of_experts_and_of_their_devices():
    routing = experts.route(normal(32, EXPERTS).at[:, 3].add(-50), K)
    found = experts.load([routing, routing], devices=4)
    np.testing.assert_array_equal(found.by_device[1], np.asarray(routing.load).reshape(4, 2).sum(1))
    assert found.imbalance[0] == found.by_device[0].max() / (32 * K / 4) and str(found).count("\n") == 2
    few = experts.load(experts.route(jnp.eye(EXPERTS)[:1], 1), devices=EXPERTS)
    assert few.imbalance.tolist() == [EXPERTS], "one token on one of the devices"
    for wrong, devices in [
        (routing.load, 1),
        ([], 1),
        (routing, 3),
        ([routing, experts.route(jnp.ones((2, 3)), 1)], 1),
    ]:
        with pytest.raises((StrategyError, StrategyTypeError)):
            experts.load(wrong, devices)


@pytest.mark.slow
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_no_tokens_give_no_results(capacity_factor):
    sent = experts.dispatch(jnp.ones((0, 2)), experts.route(jnp.ones((0, 3)), k=1, capacity_factor=capacity_factor))
    assert experts.combine(sent.rows, sent).shape == (0, 2)


def layers(params, x, layout, capacity_factor):
    """Two layers in a loop, whose activations a gradient computes again, and the load of each."""

    def layer(x, p):
        routing = experts.route(x @ p["gate"], K, capacity_factor=capacity_factor, groups=8)
        sent = experts.dispatch(x, routing, layout=layout)
        return x + experts.combine(jnp.tanh(sent.rows), sent), (routing.load, routing.dropped)

    return jax.lax.scan(jax.checkpoint(layer), x, params)


@pytest.mark.slow
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_the_report_of_a_run_has_the_load_of_each_expert(capacity_factor):
    layout = layout_of((8,), ("a",))
    x, params = normal(32, WIDTH), {"gate": normal(2, WIDTH, EXPERTS)}
    loss = lambda p, x: (layers(p, x, layout, capacity_factor)[0] ** 2).sum()  # noqa: E731
    trained = lambda p, x: (jax.grad(loss)(p, x), x + 1)  # noqa: E731
    f = shardfn.shard(trained, in_strategy=({"gate": (1, 1, 1)}, (8, 1)), donate_argnums=1)
    report = f.explain(params, x, run=True)
    _, (load, dropped) = layers(params, x, None, capacity_factor)
    found = report.to_dict()["run"]["counts"]
    assert [each["left_out"] for each in found] == dropped.tolist()
    assert [sum(each["counts"]) for each in found] == (load.sum(1) - dropped).tolist()
    if capacity_factor is None:
        assert [each["counts"] for each in found] == load.tolist()
    assert found[0]["where"].startswith("test_experts.py:") and "Counted in a run" in str(report)
    assert not x.is_deleted(), "a run for a report donates nothing"
    assert "callback" not in f.lower(params, x).as_text(), "it costs nothing where nobody asks"
    assert f.explain(params, x).to_dict()["run"] is None


def test_a_run_for_a_report_says_what_it_cannot_count():
    route = lambda x: experts.route(x, 1).weights  # noqa: E731
    own = jax.custom_batching.custom_vmap(route)  # which is not opened
    own.def_vmap(lambda size, is_batched, x: (jax.vmap(route)(x), True))
    [found] = shardfn.explain(lambda x: own(x), jnp.ones((8, 4)), run=True).to_dict()["run"]["counts"]
    assert found["counts"] == []
    assert "nothing: the function has no" in str(shardfn.explain(jnp.sin, jnp.ones(8), run=True))
    with pytest.raises(StrategyTypeError, match="a shape in the place of an array"):
        shardfn.explain(jnp.sin, jax.ShapeDtypeStruct((8,), "float32"), run=True)
    with pytest.raises(DeviceError, match="nothing can be run on"):
        shardfn.explain(jnp.sin, jnp.ones(8), device="tpu-v5e:8", run=True)
    with pytest.raises(StrategyTypeError, match="takes no arguments"):
        shardfn.explain(shardfn.plan(jnp.sin, jnp.ones(8)), run=True)


X8, R8 = jnp.ones((8, 4)), jnp.eye(8, 3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: experts.route(R8, k=2.0), "`k` cannot be 2.0"),
        (lambda: experts.route(R8, k=True), "`k` cannot be True"),
        (lambda: experts.route(R8, 1, capacity_factor="a"), "`capacity_factor` is a str"),
        (lambda: experts.route(R8, 1, groups="a"), "`groups` cannot be 'a'"),
        (lambda: experts.route(R8, 1, normalize="x"), "`normalize` cannot be 'x'"),
        (lambda: experts.route([[1.0, 2.0]], 1), "the logits are a list"),
        (lambda: experts.dispatch(X8, None), "`routing` is None"),
        (lambda: experts.dispatch([[1.0]], experts.route(R8, 1)), "x is a list"),
        (lambda: experts.dispatch(X8, experts.route(R8, 1), alltoall="no"), "`alltoall` cannot be 'no'"),
        (lambda: experts.dispatch(X8, experts.route(jnp.eye(8), 1), layout=layout_of((8,), ("a",)), axes=5), "`axes` is an int"),
        (lambda: experts.combine(X8, experts.route(R8, 1)), "`dispatched` is a Routing"),
        pytest.param(lambda: (d := experts.dispatch(X8, experts.route(R8, 1))).dot(d.rows, jnp.ones((3, 5, 2))), "do not go with the matrices",
                     marks=pytest.mark.slow),
        (lambda: experts.load_balance(experts.route(R8, 1), R8), "the routing is"),
        (lambda: experts.load_balance(R8[:5], experts.route(R8, 1)), "the logits are [5, 3]"),
        (lambda: experts.router_z(R8[0]), "the logits are [3]"),
    ],
)  # fmt: skip
def test_values_of_other_types_are_named(call, text):
    with pytest.raises((StrategyError, StrategyTypeError), match=re.escape(text)):
        call()


@pytest.mark.parametrize("capacity_factor", some_slow([None, 1.0, float("inf"), 1e9], [None, 1.0, float("inf")]))
def test_eager_calls_take_any_number_of_tokens(capacity_factor):
    x, logits = normal(5, WIDTH), normal(5, EXPERTS)
    routing = experts.route(logits, K, capacity_factor=capacity_factor)
    sent = experts.dispatch(x, routing, layout=layout_of((4,), ("a",)))
    alone = experts.dispatch(x, routing)
    np.testing.assert_allclose(experts.combine(sent.rows, sent), experts.combine(alone.rows, alone), rtol=1e-5)
    assert routing.capacity is None or routing.capacity <= 5


def test_losses_of_no_tokens_are_zero():
    logits = jnp.ones((0, 3))
    assert experts.load_balance(logits, experts.route(logits, 1)) == experts.router_z(logits) == 0


@pytest.mark.parametrize("factor", [np.float32(1.25), np.int64(2), float("inf")])
@pytest.mark.parametrize("tokens", [0, 8])
def test_any_number_is_a_capacity_factor(factor, tokens):
    made = experts.route(jnp.ones((tokens, 4)), 2, capacity_factor=factor)
    assert made.capacity == {1.25: 5, 2.0: 8}.get(float(factor), 8) if tokens else made.capacity >= 1
