"""Why not another strategy, and what if: every figure is held against a plan in which that strategy was given."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import shardfn
from shardfn import AUTO, ShardError, train
from shardfn.mindspore import Layout
from shardfn.planning.plan import Alternatives, Figures

ON = Layout((2, 4), ("a", "b"))


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp(params, x):
    return jax.nn.relu(x @ params["w1"]) @ params["w2"]


def step(params, x):
    grads = jax.grad(lambda p: (mlp(p, x) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


PARAMS = {"w1": shaped(512, 2048), "w2": shaped(2048, 512)}
X = shaped(256, 512)


def given(**options):
    entries = {"in_strategy": ({"w1": ON("None", "b"), "w2": ON("b", "None")}, ON("a", "None")),
               "out_strategy": (ON("a", "None"),), "device": "h100:8"}  # fmt: skip
    return shardfn.plan(mlp, PARAMS, X, **{**entries, **options})


def searched(fn=mlp, **options):
    return shardfn.plan(fn, PARAMS, X, **{"device": "h100:8", "level": 2, **options})


def as_layout(spec):
    return ON(*(tuple(dim) if len(dim) > 1 else dim[0] if dim else "None" for dim in spec))


# ---- why


@pytest.mark.parametrize("path", ["params/w1", "x", "result"])
def test_each_row_is_the_price_of_the_plan_with_that_cut(path):
    made = given()
    told = made.why(path)
    assert len(told.rows) == 8  # each of two axes on one of two dims, or on none, but for what is planned
    assert not told.left_out
    for row in told.rows:
        other = made.what_if({path: as_layout(row.spec)})
        assert other.decision(path).strategy == row.strategy
        assert Figures.of(other.cost) == row.figures
        assert row.more == row.figures - told.figures
    assert told.figures == Figures.of(made.cost)
    assert told.planned == made.decision(path)


@pytest.mark.parametrize(("level", "figure"), [(1, "memory"), (2, "time_s")])
def test_the_best_comes_first(level, figure):
    rows = given(level=level).why("params/w1").rows
    assert [getattr(r.figures, figure) for r in rows] == sorted(getattr(r.figures, figure) for r in rows)


def test_what_is_held_inside_stays_held():
    made = searched(step, search_mode="dynamic_programming", level=0)
    for d in (*made.inputs, *made.outputs[:1]):
        assert made._answered is not None
        same = made._answered.partitioned_with((d.path,), d.spec)
        assert same.communications == made.partitioned.communications


def test_few_are_priced_of_many_and_the_others_are_named():
    made = given()
    every, one = made.why("x"), made.why("x", most=1)
    assert len(one.rows) == 1
    assert len(one.left_out) == 7
    assert set(one.left_out) | {one.rows[0].strategy} == {r.strategy for r in every.rows}
    assert "7 more strategies were not evaluated" in str(one)
    assert every == made.why("x")


@pytest.mark.parametrize("strategy", [(1, 8), (8, 1), (2, 4)])
def test_the_searchs_runner_up_is_evaluated_first(strategy):
    made = given()
    x = dataclasses.replace(made.decision("x"), runner_up=f"{strategy}: +8.1 us")
    (row,) = dataclasses.replace(made, inputs=(*made.inputs[:-1], x)).why("x", most=1).rows
    assert row.strategy == strategy


def test_alternatives_show_themselves():
    told = given().why("x")
    text = str(told)
    assert text == repr(told)
    assert "(2, 1) as planned" in text
    assert all(str(row.strategy) in text for row in told.rows)
    assert "<table>" in told._repr_html_()
    assert isinstance(told, Alternatives)
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        console.print(told)
    assert "as planned" in capture.get()


def test_one_device_has_no_other_cut():
    told = shardfn.plan(mlp, PARAMS, X, device="cpu:1").why("x")
    assert told.rows == ()
    assert "the mesh allows no other sharding of it" in str(told)


@pytest.mark.parametrize(
    ("path", "close"),
    [("params/w3", "'params/w2' or 'params/w1'"), ("param/w2", "'params/w2'"), ("nothing", "use one of")],
)
def test_an_unknown_path_is_told_with_near_ones(path, close):
    with pytest.raises(ShardError) as caught:
        given().why(path)
    problem = caught.value.problems[0]
    assert close in problem.fix
    assert "params/w1, params/w2, x, result" in problem.why


@pytest.mark.parametrize("path", ["params/w1", "params.w1", "w1", "/params/w1"])
def test_paths_are_written_as_in_a_parameter_plan(path):
    assert given().why(path, most=1).planned.path == "params/w1"


def test_arrays_of_a_glob_are_cut_alike():
    layers = [{"up": shaped(64, 256), "down": shaped(256, 64)}] * 3

    def stack(params, x):
        for layer in params:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return x

    given = [{"up": ON("None", "b"), "down": ON("b", "None")}] * 3, ON("a", "None")
    made = shardfn.plan(stack, layers, shaped(256, 64), device="h100:8", in_strategy=given)
    found = made.why("params/*/up")
    assert found.paths == ("params/0/up", "params/1/up", "params/2/up")
    assert "params/*/up (3 arrays)" in str(found)
    assert len(found.rows) == 8
    for row in found.rows:
        assert row.figures == Figures.of(made.what_if({"params/*/up": as_layout(row.spec)}).cost)
    assert made.why("params/0/up").paths == ()
    with pytest.raises(ShardError, match="names arrays of 2 shapes"):
        made.why("params/*")


@pytest.mark.parametrize(
    ("strategy", "why", "fix"),
    [
        ({"p/*/u": (1, 8), "p/*/v": (1, 1)}, "`p/0/u` is (1, 8), `p/0/v` is (1, 1)", "why('p/*/u'), why('p/*/v')"),
        ({"p/*": (1, 1), "p/1/u": (1, 8)}, "`p/0/u` is (1, 1), `p/1/u` is (1, 8)", "why('p/0/u'), why('p/1/u')"),
        ({"p/*/u": ON("None", "a"), "p/*/v": ON("None", "a"), "x": (1, 1)}, None, None),
    ],
)
def test_arrays_sharded_differently_have_no_one_strategy(strategy, why, fix):
    layers = [{"u": shaped(64, 64), "v": shaped(64, 64)}] * 3

    def stack(p, x):
        for layer in p:
            x = jnp.tanh(x @ layer["u"]) @ layer["v"]
        return x

    made = shardfn.plan(stack, layers, shaped(32, 64), device="cpu:8", parameter_plan=strategy)
    if why is None:
        assert len(made.why("p/*", most=1).paths) == 6
        return
    with pytest.raises(ShardError, match="names arrays with 2 different shardings") as caught:
        made.why("p/*")
    assert caught.value.problems[0].why == why + ": they have no common sharding to compare others with"
    assert caught.value.problems[0].fix == "ask for each sharding separately: " + fix
    for glob in fix.split(", "):
        assert made.why(glob[5:-2], most=1).rows


def test_the_title_of_many_arrays_names_a_few():
    """Arrays whose paths have nothing in common, too: there is no one text with stars for them."""
    w = jax.ShapeDtypeStruct((16, 16), "float32")
    p = {"layers": [dict.fromkeys("qkvo", w) for _ in range(4)], "last": w}
    made = shardfn.plan(lambda p: jax.tree.map(jnp.tanh, p), p, device="tpu-v5e:2x2")
    title = "Other shardings of {}, float32[16, 16] (searched), everything else as planned"
    for glob, named in [
        ("p/layers/*/q", "p/layers/*/q (4 arrays)"),
        ("*/q", "p/layers/*/q, result/layers/*/q (8 arrays)"),
        ("p/*", "p/last, p/layers/*/k, p/layers/*/o and 2 more (17 arrays)"),
    ]:
        assert made.why(glob, most=1).table().title == title.format(named)


@pytest.mark.parametrize("most", [0, -1, True, 2.0, "3"])
def test_how_many_must_be_a_number(most):
    with pytest.raises(ShardError, match="cannot be evaluated"):
        given().why("x", most=most)


# ---- what if


def test_an_entry_is_the_users_and_the_rest_is_searched_again():
    made = searched()
    other = made.what_if({"params/w1": (1, 8)})
    fresh = searched(parameter_plan={"params/w1": (1, 8)})
    assert [d.strategy for d in other.inputs] == [d.strategy for d in fresh.inputs]
    assert other.cost == fresh.cost
    assert [d.source for d in other.inputs] == ["you", "searched", "searched"]
    assert other.inputs[0].reason == "what_if['params/w1']"
    assert [d.source for d in made.inputs] == ["searched"] * 3  # the plan itself stays


@pytest.mark.parametrize("entry", [(1, 1), (1, 8)])
def test_moments_follow_their_parameter_as_in_a_parameter_plan(entry):
    def loss(p, x):
        return ((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2).mean()

    def planned(**entries):
        step = train.step(loss, optax.adam(1e-3), mode="semi_auto_parallel", in_strategy=((2, 1),),
                          parameter_plan={"up": (1, 4), "down": (4, 1), **entries})  # fmt: skip
        return step.plan(step.init(params, x), x)

    params, x = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}, jnp.ones((32, 64))
    asked, made = planned().what_if({"up": entry}), planned(up=entry)
    assert [d.strategy for d in asked.inputs] == [d.strategy for d in made.inputs]
    assert asked.cost == made.cost
    (row,) = [row for row in planned().why("up").rows if row.strategy == entry]
    assert row.figures.bytes_sent == pytest.approx(made.cost.bytes_sent, rel=0.05)  # the ops inside stay as planned


def test_entries_of_every_kind():
    made = given()
    assert searched().what_if({"params/*": (1, 8)}).inputs[1].strategy == (1, 8)
    assert made.what_if({}) == made
    opened = made.what_if({"x": AUTO})
    assert [d.source for d in opened.inputs] == ["you", "you", "searched"]
    plain = searched(in_strategy=({"w1": (1, 8), "w2": AUTO}, AUTO))
    assert plain.what_if({"x": None, "w1": AUTO}).decision("x").strategy == (8, 1)
    result = searched().what_if({"result": (1, 8)})
    assert result.outputs[0].strategy == (1, 8)
    assert result.outputs[0].source == "you"


def test_an_argument_may_be_called_result():
    made = shardfn.plan(lambda result: result * 2, shaped(8, 4), device="cpu:2")
    other = made.what_if({"result": (1, 2)})
    assert other.inputs[0].strategy == (1, 2)
    assert other.inputs[0].source == "you"


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"params/w9": (1, 8)}, "`what_if` names `params/w9`"),
        ({"params/w1": (3, 1)}, "cannot be sharded 3 ways"),
        ({"result/4": (1, 8)}, "`what_if` names `result/4`"),
        ({3: (1, 8)}, "a key of `what_if` is an int"),
        ({"x": "rows"}, "a value of `what_if` is a str"),
        ([("x", (1, 8))], "`what_if` takes a dict"),
        (None, "`what_if` takes a dict"),
    ],
)
def test_wrong_entries_are_told(entries, what):
    with pytest.raises(ShardError) as caught:
        searched().what_if(entries)
    problem = caught.value.problems[0]
    assert what in problem.what
    assert "parameter_plan" not in str(problem)
    assert problem.fix


def test_the_best_compiled_plan_can_be_searched_again():
    ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), PARAMS)
    made = shardfn.shard(mlp, level=2, compile_candidates=2).plan(ones, jnp.ones((256, 512)))
    other = made.what_if({"params/w1": (1, 8)})
    assert other.decision("params/w1").source == "you"
    assert other.decision("params/w2").source == "searched"


def test_one_step_after_another():
    made = searched().what_if({"params/w1": (1, 8)}).what_if({"x": (1, 1)})
    assert [d.source for d in made.inputs] == ["you", "searched", "you"]
    assert made.why("params/w2", most=1).rows


def test_a_layout_that_xla_computes_wrongly_is_told():
    def convolve(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")

    made = shardfn.plan(
        convolve, shaped(8, 4, 16, 16), shaped(8, 4, 3, 3), in_strategy=(None, (1, 1, 1, 1)), device="cpu:8"
    )
    assert not any("shardfn gathers" in f for f in made.diagnostics)
    other = made.what_if({"x": (1, 1, 4, 2)})
    assert any("shardfn gathers" in f for f in other.diagnostics)


def test_an_open_dimension_is_searched_again():
    """The first plan's search chose how often `b` is sharded; another entry or another objective may ask for more or less."""
    shapes = {"a": jax.ShapeDtypeStruct((64, 64), "float32"), "b": jax.ShapeDtypeStruct((64, 64), "float32")}
    made = shardfn.plan(lambda t: t["a"] @ t["b"], shapes, in_strategy=({"a": (1, 1), "b": (1, AUTO)},), device="cpu:8")
    asked = made.what_if({"a": (8, 1)})
    alone = shardfn.plan(
        lambda t: t["a"] @ t["b"], shapes, in_strategy=({"a": (8, 1), "b": (1, AUTO)},), device="cpu:8"
    )
    assert [d.strategy for d in asked.inputs] == [d.strategy for d in alone.inputs] == [(8, 1), (1, 1)]
    assert made.decision("b").strategy != (1, 1)


def test_an_entry_of_another_rank_is_said_once_and_not_of_moments():
    optimizer, params = optax.adam(1e-3), {f"l{i}": {"w": shaped(64, 64), "b": shaped(64)} for i in range(3)}

    def adam(params, state, x):
        def loss(params):
            return jnp.mean(functools.reduce(lambda x, p: jnp.tanh(x @ p["w"] + p["b"]), params.values(), x))

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    made = shardfn.plan(
        adam, params, jax.eval_shape(optimizer.init, params), shaped(32, 64), style="fsdp", device="h100:8"
    )
    with pytest.raises(ShardError) as caught:
        made.what_if({"params/*": (1, 1)})
    assert len(caught.value.problems) == 3 and all("`params/l" in problem.what for problem in caught.value.problems)
    assert {problem.fix for problem in caught.value.problems} == {"write REPLICATED, which fits any rank"}
