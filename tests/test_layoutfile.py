"""Layout files: what a plan decides is saved, read and used again; what does not fit is told at once; nothing blows up."""

import dataclasses
import json
import pathlib
import re
import time
import tomllib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from jax.sharding import NamedSharding

import shardfn
from shardfn import AUTO, load_layout, plan, shard, tag
from shardfn.cli.main import main
from shardfn.errors import Problem, ShardError
from shardfn.frontend.paths import escaped
from shardfn.layoutfile import plan_file
from shardfn.layoutfile.files import LayoutFile, layout_shardings, read_layout, recipes, write_layout
from shardfn.layoutfile.toml import MAX_BYTES, parse_toml, to_toml
from shardfn.mindspore import Layout, auto_parallel
from shardfn.mindspore.parallel import layout_of
from shardfn.planning.layout_rules import Constraint, DecisionSource, LayoutRule
from shardfn.planning.plan import answered_call
from shardfn.runtime.layout_check import check_layout
from tests.marks import some_slow

PARAMS = {"up": jnp.ones((16, 32)) / 8, "down": jnp.ones((32, 16)) / 8}
X = jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16) / 100


def loss(params, x):
    hidden = tag(jax.nn.relu(x @ params["up"]), "hidden")
    return jnp.mean(jnp.square(hidden @ params["down"]))


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def made(text: str, name: str = "layout.toml") -> LayoutFile:
    problems: list[Problem] = []
    layout = parse_toml(text, name, problems)
    assert layout is not None, problems
    return layout


def wrong(text: str) -> list[str]:
    problems: list[Problem] = []
    parse_toml(text, "layout.toml", problems)
    assert problems
    return [p.what for p in problems]


BY_HAND = """
format = "shardfn-layout"
version = 2
others = "replicated"
batch = ["data"]

[mesh]
data = "left"
model = 2

[arguments]
"*/up" = { dims = ["in", "out"], sharding = { out = "model" } }
"*/down" = ["model", "data?"]
"""

# ---- saved and used again

ASKED = {
    "searched": {"level": 2},
    "least memory": {"level": 1},
    "given": {"in_strategy": ({"up": (1, 4), "down": (4, 1)}, (2, 1))},
    "results given": {"in_strategy": (None, (8, 1)), "out_strategy": ({"up": (4, 1), "down": (1, 1)}, None)},
    "an order of devices": {"in_strategy": (None, Layout((2, 4), ("dp", "mp"), [*range(7, -1, -1)])("dp", "None"))},
    "for a pod": {"device": "tpu-v5e:2x2", "level": 2},
    "one device": {"device": jax.devices()[:1]},
}


@pytest.mark.parametrize("asked", some_slow(ASKED, {"searched", "least memory", "for a pod"}))
def test_what_is_saved_is_the_plan(asked, tmp_path):
    plan_ = plan(step, PARAMS, X, **asked)
    plan_.save(tmp_path / "layout.toml")
    loaded = load_layout(tmp_path / "layout.toml")
    assert loaded == plan_
    assert plan_ == loaded
    device = {"device": asked["device"]} if "device" in asked else {}
    again = plan(step, PARAMS, X, layout=tmp_path / "layout.toml", **device)
    assert [c.what for c in plan_.diff(again) if c.what != "optimality"] == []
    assert again.cost == plan_.cost
    assert again.order == plan_.order
    assert {d.source for d in again.inputs} == {"file"}
    assert again.inputs[0].reason.startswith(str(tmp_path / "layout.toml"))


@pytest.mark.slow
def test_what_is_held_inside_is_saved(tmp_path):
    from examples.models import abstract, named

    fn, args = abstract(named.dlrm)
    first = plan(fn, *args, level=0)
    assert first.constraints
    first.save(tmp_path / "layout.toml")
    again = plan(fn, *args, layout=tmp_path / "layout.toml")
    assert again.constraints == first.constraints
    assert (again.cost, again.diagnostics) == (first.cost, again.diagnostics)
    text = (tmp_path / "layout.toml").read_text().replace('op = "dot_general"', 'op = "gather"', 1)
    (tmp_path / "layout.toml").write_text(text)
    told = plan(fn, *args, layout=tmp_path / "layout.toml").diagnostics
    assert any("program has no such op" in finding for finding in told)
    assert "a gather at" in check_layout(tmp_path / "layout.toml", fn, args)[0].what


def test_what_is_held_alike_in_equal_blocks_is_one_entry():
    held = [Constraint("dot_general", n, "net.py:7", (None, None), ((("data",), ()),)) for n in (3, 40, 77)]
    other = Constraint("dot_general", 39, "net.py:8", (None, None), ((("data",), ()),))
    layout = LayoutFile(mesh=(("data", 8),), constraints=(held[0], other, *held[1:]))
    text = to_toml(layout)
    assert text.count("[[constraints]]") == 2 and "equation = [\n  3, 40, 77,\n]" in text and "equation = 39\n" in text
    assert made(text) == layout and len(made(text).constraints) == 4
    assert made(text.replace("77", "78")) != layout


DIFFERENT = {
    "level": {"level": 1},
    "an argument": {"in_strategy": ({"up": (1, 2), "down": (2, 1)}, (2, 1))},
    "a result": {"out_strategy": ({"up": (2, 1), "down": (1, 1)}, None)},
    "the device": {"device": "tpu-v5e:2x4"},
    "who said it": {"in_strategy": None, "parameter_plan": {"up": (1, 4), "down": (4, 1), "x": (2, 1)}},
}


@pytest.mark.parametrize("other", DIFFERENT.values(), ids=DIFFERENT)
def test_other_plans_are_not_what_was_saved(other, tmp_path):
    asked = {"in_strategy": ({"up": (1, 4), "down": (4, 1)}, (2, 1)), "level": 2}
    first = plan(step, PARAMS, X, **asked)
    first.save(tmp_path / "layout.toml")
    assert load_layout(tmp_path / "layout.toml") != plan(step, PARAMS, X, **{**asked, **other})


ROWS, COLUMNS = ("a", 1), (1, "a")
EVERY = "p/layers/*/w1"


@pytest.mark.parametrize(
    ("more", "plan_of", "rules"),
    [
        ({}, {"*": (8, 1)}, {EVERY: ROWS, "p/layers/*/w2": ROWS}),
        ({}, {"*/w1": (8, 1), "*/w2": (1, 8)}, {EVERY: ROWS, "p/layers/*/w2": COLUMNS}),
        ({}, {"*": (8, 1), "p/layers/2/w1": (1, 8)}, {EVERY: ROWS, "p/layers/2/w1": COLUMNS, "p/layers/*/w2": ROWS}),
        (
            {},
            {"*/w2": (8, 1), "p/layers/[012]/w1": (1, 8), "p/layers/[345]/w1": (8, 1)},
            {EVERY: COLUMNS, **{f"p/layers/{i}/w1": ROWS for i in (3, 4, 5)}, "p/layers/*/w2": ROWS},
        ),
        ({"layers/x/w1": 0}, {"*": (8, 1)}, {EVERY: ROWS, "p/layers/*/w2": ROWS, "p/layers[/]x[/]w1": ROWS}),
        ({"head": 0, "a[0]*": 0}, {"*": (8, 1)}, {EVERY: ROWS, "p/layers/*/w2": ROWS, "p/head": ROWS, "p/a[[]0][*]": ROWS}),
    ],
)  # fmt: skip
def test_layers_that_are_cut_alike_have_one_rule(more, plan_of, rules, tmp_path):
    """And what a glob meets besides has a rule of its own, which goes before it."""
    w = jax.ShapeDtypeStruct((8, 8), "float32")
    p = {"layers": [{"w1": w, "w2": w} for _ in range(6)], **dict.fromkeys(more, w)}
    function = lambda p: jax.tree.map(jnp.sin, p)  # noqa: E731
    made = plan(function, p, parameter_plan=plan_of, device="cpu:8")
    assert {r.glob: r.sharding for r in plan_file.layout_of_plan(made).arguments} == {
        g.replace("[/]", "/"): sharding for g, sharding in rules.items()
    }
    made.save(tmp_path / "layout.toml")
    assert load_layout(tmp_path / "layout.toml") == made
    again = plan(function, p, layout=tmp_path / "layout.toml", device="cpu:8")
    assert [d.spec for d in (*again.inputs, *again.outputs)] == [d.spec for d in (*made.inputs, *made.outputs)]
    text = (tmp_path / "layout.toml").read_text()
    assert '"p/layers/*/w2" = ["a", 1]  # 6 x float32[8, 8] (8, 1); you' in text or '"p/layers/*/w2" = [1, "a"]' in text
    assert text.count("by = ") <= 8


def test_the_sources_stand_beside_the_rules(tmp_path):
    plan(step, PARAMS, X, in_strategy=({"up": (1, 4), "down": (4, 1)}, (2, 1))).save(tmp_path / "layout.toml")
    text = (tmp_path / "layout.toml").read_text()
    assert '"params/up" = [1, "a"]  # float32[16, 32] (1, 4); you: in_strategy[0][\'up\']' in text
    assert tomllib.loads(text)["mesh"] == {"a": 4, "b": 2}


def test_a_file_by_hand_lays_out_what_nothing_is_said_of(tmp_path):
    (tmp_path / "mine.toml").write_text(BY_HAND)
    wanted = step(PARAMS, X)
    for layout in (tmp_path / "mine.toml", str(tmp_path / "mine.toml"), load_layout(tmp_path / "mine.toml"),
                   plan(step, PARAMS, X, layout=tmp_path / "mine.toml")):  # fmt: skip
        sharded = shard(step, layout=layout)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sharded(PARAMS, X), wanted)
        strategies = {d.path: d.strategy for d in sharded.plan(PARAMS, X).inputs}
        assert strategies == {"params/up": (1, 2), "params/down": (2, 4), "x": (4, 1)}
    mine = plan(step, PARAMS, X, layout=tmp_path / "mine.toml", parameter_plan={"x": (1, 1)})
    assert [(d.path, d.source) for d in mine.inputs if d.source == "you"] == [("x", "you")]
    smaller = plan(step, PARAMS, X, layout=load_layout(tmp_path / "mine.toml").with_mesh(model=8))
    assert smaller.axes == (("data", 1), ("model", 8))
    assert plan(step, PARAMS, X, layout=tmp_path / "mine.toml", device=jax.devices()[:1]).inputs[0].strategy == (1, 1)


def test_cuts_in_a_file_are_placed_together(tmp_path):
    head = 'format = "shardfn-layout"\nversion = 2\n[arguments]\n'
    (tmp_path / "strategies.toml").write_text(head + '"x" = [2, 1]\n"up" = [1, 4]\n"params/down" = "open"\n')
    found = plan(step, PARAMS, X, layout=tmp_path / "strategies.toml", search_mode="sharding_propagation")
    assert [(d.path, d.strategy, d.source) for d in found.inputs] == [
        ("params/down", (4, 1), "propagated"), ("params/up", (1, 4), "file"), ("x", (2, 1), "file"),
    ]  # fmt: skip


def test_what_if_overrules_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text(BY_HAND)
    first = plan(step, PARAMS, X, layout=tmp_path / "mine.toml")
    replicated = Layout((4, 2), ("data", "model"))("None", "None")
    other = first.what_if({"params/up": replicated})
    assert [(d.strategy, d.source) for d in other.inputs if d.path == "params/up"] == [((1, 1), "you")]


# ---- tags


def test_a_tag_is_nothing_by_itself():
    def plain(params, x):
        return jnp.mean(jnp.square(jax.nn.relu(x @ params["up"]) @ params["down"]))

    f, g = (jax.jit(jax.vmap(jax.grad(h), (None, 0))) for h in (loss, plain))
    x = X[None] * jnp.arange(1.0, 3.0)[:, None, None]
    jax.tree.map(np.testing.assert_array_equal, f(PARAMS, x), g(PARAMS, x))
    assert f.lower(PARAMS, x).as_text().count("\n") == g.lower(PARAMS, x).as_text().count("\n")
    assert tag({"a": 1.0}, "any") == {"a": 1.0}
    with pytest.raises(ShardError, match="a tag is a name, not an int"):
        tag(X, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["plain", "scan", "remat", "jit"])
def test_a_rule_of_a_tag_holds_it(where):
    def inner(x):
        return tag(jax.nn.relu(x), "h")

    def scanned(x):
        return jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]

    f = {"plain": inner, "scan": scanned, "remat": jax.checkpoint(inner), "jit": jax.jit(inner)}[where]
    layout = made(
        'format = "shardfn-layout"\nversion = 2\n[mesh]\na = 8\n[arguments]\nx = ["a", 1]\n[activations]\n"h*" = [1, "a"]'
    )

    def fn(x):
        return f(x) * 2

    x = jnp.ones((16, 16))
    before = plan(fn, x, in_strategy=((8, 1),))
    after = shard(fn, layout=layout)
    assert {c.kind for c in before.collectives} == set()
    assert "all-to-all" in {c.kind for c in after.plan(x).collectives}
    np.testing.assert_array_equal(after(x), fn(x))
    assert after.lower(x).compile().as_text().count("all-to-all") >= 1
    assert load_layout(after.plan(x)) == after.plan(x)
    assert jax.grad(lambda x: after(x).sum())(x).shape == x.shape


def test_a_tag_that_does_not_fit_is_told():
    text = (
        BY_HAND
        + '[activations]\nhidden = ["data", 1, 1]\nnothing = ["data", 1]\n"maybe*" = { sharding = [1], optional = true }\n'
    )
    told = [p.what for p in check_layout(made(text), step, (PARAMS, X))]
    assert told == [
        "a rule of layout.toml matches no array: `nothing`",
        "the activation `hidden` has 2 dimensions, but its rule has 3",
    ]


@pytest.mark.parametrize(
    "rules", ['"h" = [4, 1]', '[arguments]\nx = [1, 1]\n[activations]\n"h" = [4, 1]', '"*" = "replicated"']
)
def test_a_rule_of_a_tag_without_axes_is_refused(rules):
    """It would not act: the axes of the arguments are decided after the tags are placed."""
    text = 'format = "shardfn-layout"\nversion = 2\n' + ("" if "[arg" in rules else "[activations]\n") + rules
    with pytest.raises(ShardError, match=r"(of|for) an activation") as caught:
        plan(lambda x: tag(x, "h") * 2, jnp.ones((16, 16)), layout=made(text))
    assert "fix:   write [mesh]" in str(caught.value)
    named = made('format = "shardfn-layout"\nversion = 2\n[mesh]\na = 8\n[activations]\nh = "open"')
    assert plan(lambda x: tag(x, "h") * 2, jnp.ones((16, 16)), layout=named).activations == named.activations


def test_integers_beside_rules_of_tags_are_on_the_mesh_of_the_file():
    named = made(
        'format = "shardfn-layout"\nversion = 2\n[mesh]\ndata = 2\nmodel = 4\n[activations]\nhidden = ["data", "model"]'
    )
    sharded = shard(loss, ({"up": (1, 4), "down": (4, 1)}, (2, 1)), layout=named)
    assert dict(sharded.plan(PARAMS, X).mesh.shape) == {"data": 2, "model": 4}
    np.testing.assert_allclose(sharded(PARAMS, X), loss(PARAMS, X), rtol=1e-5)
    with pytest.raises(ShardError, match="cannot be sharded"):
        plan(loss, PARAMS, X, in_strategy=({"up": (2, 2), "down": (1, 1)}, (1, 1)), layout=named)
    other = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(ShardError, match="`hidden` is on another mesh than the arrays"):
        plan(loss, PARAMS, X, layout=named, device=other)


# ---- check

WRONG = """
format = "shardfn-layout"
version = 2

[mesh]
data = 4
model = 4

[arguments]
"params/up" = ["rows", 1]
"*/down" = ["data", 1, 1]
"params/d*" = [1, "data"]
"params/nothing" = [1, "model"]
"x" = ["data", "data"]

[results]
"result/1" = [1]
"""


def test_faults_of_form_do_not_hide_faults_of_fit(tmp_path):
    text = BY_HAND + '[activations]\nhidden = [1.5, 1]\nnothing = ["data", 1]\n[results]\n"result/1" = ["data"]\n'
    (tmp_path / "mine.toml").write_text(text)
    told = [p.what for p in check_layout(tmp_path / "mine.toml", step, (PARAMS, X))]
    assert len(told) == 3 and "`1.5` is no entry" in told[0]
    assert "matches no array: `nothing`" in told[1] and "output 1 has 0 dimensions" in told[2]
    (tmp_path / "mine.toml").write_text(BY_HAND + "[activations]\nhidden = [1.5, 1]\n")
    assert len(check_layout(tmp_path / "mine.toml", step, (PARAMS, X))) == 1
    (tmp_path / "mine.toml").write_text(text.replace("[mesh]", '[mesh]\n"a b" = 1'))
    told = [p.what for p in check_layout(tmp_path / "mine.toml", step, (PARAMS, X))]
    assert len(told) == 2 and "no name of a mesh axis" in told[0]  # what follows from the grid is not told


def test_one_fault_of_a_rule_is_told_once():
    arrays = {f"layers/{i}": jax.ShapeDtypeStruct((6, 6), "float32") for i in range(5)}
    arrays["layers/z"] = jax.ShapeDtypeStruct((10, 6), "float32")
    layout = made('format = "shardfn-layout"\nversion = 2\n[mesh]\ndata = 8\n[arguments]\n"*" = ["data", 1]\n')
    one, two = check_layout(layout, arrays, device="cpu:8")
    assert one.what.endswith("at `layers/0` cannot be sharded 8 ways along dimension 0") and one.where.endswith(
        ", and 4 more arrays"
    )
    assert two.why == "10 is not divisible by 8" and "more array" not in two.where
    axis = check_layout(dataclasses.replace(layout, arguments=(LayoutRule("*", ("rows", 1)),)), arrays, device="cpu:8")
    assert len(axis) == 1 and axis[0].where.endswith(", and 5 more arrays")


def test_check_layout_tells_all_that_does_not_fit_at_once(golden):
    more = {**PARAMS, "bias": jnp.ones(6), "odd": jnp.ones((6, 6))}
    golden(
        "messages_layoutfile",
        str(ShardError(check_layout(made(WRONG + '[activations]\n"hid*" = ["data"]\n'), step, (more, X)))),
    )
    odd = made(BY_HAND.replace('others = "replicated"', "") + '"*/odd" = ["data", 1]\n')
    assert [p.what.partition("`")[0] for p in check_layout(odd, step, (more, X))] == [
        "argument 0 ", "no rule of layout.toml matches "
    ]  # fmt: skip


def test_check_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "model.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(params, x): return jnp.sum(x @ params['up'] @ params['down'])\n"
        "def arguments(): return {'up': jnp.ones((16, 32)), 'down': jnp.ones((32, 16))}, jnp.ones((8, 16))\n"
        "def make(): return loss, arguments()\n"
        "def parameters(): return {'params': arguments()[0]}\n"
    )
    (tmp_path / "mine.toml").write_text(BY_HAND)
    layout = str(tmp_path / "mine.toml")
    assert main(["check", layout, "--model", f"{file}:make", "--devices", "16"]) == 0
    assert "fits: 2 rules, 3 arrays\nloss: " in capsys.readouterr().out
    assert (
        main(["check", layout, "--model", f"{file}:loss", "--args", f"{file}:arguments", "--device", "tpu-v5e:4x4"])
        == 0
    )
    assert main(["check", layout, "--model", f"{file}:parameters", "--devices", "8"]) == 0
    assert "2 rules, 2 arrays" in capsys.readouterr().out
    assert main(["check", layout, "--model", f"{file}:make", "--devices", "3"]) == 2
    assert "3 is not divisible by 2" in capsys.readouterr().err
    assert main(["check", "llama/fsdp-pt", "--model", f"{file}:make"]) == 2
    assert "did you mean 'llama/fsdp-tp'" in capsys.readouterr().err
    assert main(["check", layout, "--model", f"{file}:make", "--devices", "0"]) == 2
    assert main(["check", str(tmp_path / "absent.toml"), "--model", f"{file}:make"]) == 2


def test_missing_layout_file_suggests_layout_files_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pyproject.toml", "nopes.toml"):
        (tmp_path / name).write_text('[project]\nname = "nope"\n')
    (tmp_path / "package.json").write_text('{"name": "nope"}')
    (tmp_path / "layout.toml.d").mkdir()
    (tmp_path / "folder.toml").mkdir()
    for name in ("nope.toml", "nope.json", "package.toml", "pyproject.json", "folders.toml"):
        with pytest.raises(ShardError) as caught:
            load_layout(name)
        assert not re.search(r"pyproject|nopes|package|folder\.", caught.value.problems[0].fix), name
        assert "give the path of a layout file, or the name of a recipe" in caught.value.problems[0].fix
    (tmp_path / "mine.toml").write_text(BY_HAND)
    with pytest.raises(ShardError, match=r"did you mean 'mine\.toml'"):
        load_layout("mien.toml")


def test_what_plan_saved_is_held_against_the_function_and_its_arguments(tmp_path, capsys):
    """The arguments alone have no names: the error says how they get them, and what in them is no array."""
    file, layout = tmp_path / "train.py", str(tmp_path / "layout.toml")
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(params, x): return jax.nn.relu(x @ params['up']) @ params['down']\n"
        "def shapes(): return {'up': jnp.ones((16, 32)), 'down': jnp.ones((32, 16))}, jnp.ones((8, 16))\n"
        "def more(): return {'up': jnp.ones((16, 32)), 'act': jax.nn.relu}, jnp.ones((8, 16))\n"
    )
    given = ["--args", f"{file}:shapes", "--device", "tpu-v5e:2x2"]
    assert main(["plan", f"{file}:step", *given, "--save", layout, "--quiet"]) == 0
    assert main(["check", layout, "--model", f"{file}:step", *given]) == 0
    assert main(["check", layout, "--model", f"{file}:shapes", *given[2:]]) == 2
    err = capsys.readouterr().err
    assert "no rule of" in err and "--model FILE.py:step --args FILE.py:FUNCTION" in err and "problems" not in err
    assert main(["check", layout, "--model", f"{file}:more", *given[2:]]) == 2
    err = capsys.readouterr().err
    assert "no rule of" in err and "0/act" not in err and "--args FILE.py:FUNCTION" in err
    assert main(["check", layout, "--model", f"{file}:step", *given[2:]]) == 2
    assert "give --args or --shapes too" in capsys.readouterr().err


def test_a_module_that_holds_functions_is_checked_without_them(tmp_path, capsys):
    pytest.importorskip("equinox")
    file, layout = tmp_path / "model.py", str(tmp_path / "layout.toml")
    file.write_text(
        "import equinox as eqx, jax\n"
        "def module(): return eqx.nn.MLP(8, 8, 16, 2, jax.nn.gelu, key=jax.random.key(0))\n"
        "def arrays(): return eqx.filter(module(), eqx.is_array)\n"
        "def make(): return (lambda mlp, x: jax.vmap(mlp)(x)), (module(), jax.numpy.ones((8, 8)))\n"
    )
    (tmp_path / "layout.toml").write_text(
        'format = "shardfn-layout"\nversion = 2\nothers = "replicated"\n[mesh]\ndata = "left"\n'
    )
    for model in ("module", "make", "arrays"):
        assert main(["check", layout, "--model", f"{file}:{model}", "--devices", "8"]) == 0, capsys.readouterr().err


# ---- trees


def test_shardings_of_a_tree():
    tree = {"params": PARAMS, "count": jnp.zeros((), jnp.int32)}
    layout = made(BY_HAND)
    found = layout_shardings(layout, tree, jax.devices())
    assert found["params"]["down"].shard_shape((32, 16)) == (16, 4)
    assert found["count"].spec == jax.sharding.PartitionSpec()
    assert {s.mesh for s in jax.tree.leaves(found)} == {found["count"].mesh}
    put = jax.device_put(tree, found)
    np.testing.assert_array_equal(put["params"]["up"], PARAMS["up"])
    assert layout_shardings(layout, PARAMS, 64, root="params")["down"].mesh.size == 64
    assert layout_shardings(layout, tree, jax.devices()[:1])["params"]["up"].shard_shape((16, 32)) == (16, 32)
    with pytest.raises(ShardError) as caught:
        layout_shardings(made(BY_HAND.replace('others = "replicated"', "")), tree, 3)
    assert [p.what.split("`")[0] for p in caught.value.problems][:1] == [
        "the mesh of layout.toml has 2 devices in its fixed axes, but there are 3"
    ]
    assert "no rule of layout.toml matches `count`" in str(caught.value)


def test_the_shardings_are_the_plans():
    for asked in (ASKED["given"], ASKED["an order of devices"]):
        plan_ = plan(step, PARAMS, X, **asked)
        found = layout_shardings(plan_, {"params": PARAMS, "x": X}, jax.devices())
        for path, leaf in jax.tree_util.tree_flatten_with_path({"params": PARAMS, "x": X})[0]:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            mine = jax.tree_util.tree_flatten_with_path(found)[0]
            sharding = next(s for p, s in mine if p == path)
            assert sharding.is_equivalent_to(
                NamedSharding(plan_.mesh, plan_.decision(name).partition_spec), leaf.ndim
            ), name


# ---- MindSpore's files

THEIRS = {
    "current_stage": 2,
    "parallel_layout_item": {
        "up": {"dev_matrix": [2, 4], "tensor_map": [-1, 0], "tensor_shape": [16, 32], "field": 0,
               "opt_weight_shard_size": 2, "opt_weight_shard_step": 4},
        "down": {"dev_matrix": [4, 2], "tensor_map": [1, -1], "tensor_shape": [32, 16], "field": 0,
                 "opt_weight_shard_size": 0, "opt_weight_shard_step": 0},
    },
    "parallel_strategy_item": {"MatMul_w1": {"parallel_strategy": [[2, 1], [1, 4]], "stage": 0}},
}  # fmt: skip


def test_a_strategy_json_found_elsewhere_is_used(tmp_path):
    file = tmp_path / "strategy.json"
    file.write_text(json.dumps(THEIRS))
    layout = load_layout(file)
    assert layout.mesh == (("a", 2), ("b", 2), ("c", 2))
    assert [(r.glob, r.sharding) for r in layout.arguments] == [("up", ("a", ("b", "c"))), ("down", (("a", "b"), 1))]
    held = {d.path: d for d in plan(step, PARAMS, X, layout=file).inputs}
    assert (held["params/up"].strategy, held["params/down"].strategy) == ((2, 4), (4, 1))
    # by MindSpore's own rule: rank 5 is at (1, 1) of the matrix (2, 4); its optimizer shards the first axis
    slices = layout_of(plan(step, PARAMS, X, layout=file), "params/up").slices(PARAMS["up"].shape)[5]
    assert slices == (slice(8, 16), slice(8, 16))


@pytest.mark.parametrize(
    "asked", [ASKED["given"], pytest.param(ASKED["for a pod"], marks=pytest.mark.slow)], ids=["given", "pod"]
)
def test_a_plan_as_strategy_json(asked, tmp_path):
    plan_ = plan(step, PARAMS, X, **asked)
    plan_.save(tmp_path / "strategy.json")
    data = json.loads((tmp_path / "strategy.json").read_text())
    for name in ("up", "down"):
        item = data["parallel_layout_item"][name]
        theirs = Layout.from_tensor_map(tuple(item["dev_matrix"]), item["tensor_map"])
        assert theirs.slices(tuple(item["tensor_shape"])) == layout_of(plan_, f"params/{name}").slices(
            tuple(item["tensor_shape"])
        )
        assert set(item) == {
            "dev_matrix",
            "tensor_map",
            "tensor_shape",
            "field",
            "opt_weight_shard_size",
            "opt_weight_shard_step",
        }
    assert data["parallel_strategy_item"]["dot_general-op0"]["stage"] == 0
    again = plan(step, PARAMS, X, layout=tmp_path / "strategy.json", device=asked.get("device"))
    assert [d.strategy for d in again.inputs] == [d.strategy for d in plan_.inputs]


BROKEN = {
    "no JSON": ("{", "is no JSON"),
    "no layouts": ("{}", "is no strategy file"),
    "a matrix of text": ({"w": {"dev_matrix": "8", "tensor_map": [0]}}, "dev_matrix must be"),
    "an axis that is not there": ({"w": {"dev_matrix": [8], "tensor_map": [1]}}, "names an axis twice, or one that"),
    "an axis twice": ({"w": {"dev_matrix": [8], "tensor_map": [0, 0]}}, "names an axis twice"),
    "other devices": ({"w": {"dev_matrix": [8], "tensor_map": [0]}, "v": {"dev_matrix": [4], "tensor_map": [0]}}, "4 and 8 devices"),
    "no common grid": ({"w": {"dev_matrix": [2, 3], "tensor_map": [0]}, "v": {"dev_matrix": [3, 2], "tensor_map": [0]}}, "do not fit one mesh"),
    "ranks": ({"w": {"dev_matrix": [8], "tensor_map": [0], "tensor_shape": [4, 4]}}, "different numbers of dims"),
    "an optimizer over a taken axis": ({"w": {"dev_matrix": [8], "tensor_map": [0], "opt_weight_shard_size": 2, "opt_weight_shard_step": 4}}, "already shards the parameter"),
    "huge": ({"w": {"dev_matrix": [10**9, 10**9], "tensor_map": [0]}}, "dev_matrix must be"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_strategy_json_is_refused(data, why, tmp_path):
    text = data if isinstance(data, str) else json.dumps({"parallel_layout_item": data})
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ShardError, match=why):
        load_layout(tmp_path / "s.json")


@pytest.mark.parametrize("name", ["strategy.json", "strategy.toml", "strategy.ckpt"])
def test_the_contexts_files(name, tmp_path):
    file = str(tmp_path / name)
    asked = {"in_strategy": ({"up": (1, 4), "down": (4, 1)}, (2, 1))}
    with auto_parallel(strategy_ckpt_save_file=file):
        assert shard(step, **asked)(PARAMS, X)[1] == pytest.approx(float(step(PARAMS, X)[1]))
    with auto_parallel(strategy_ckpt_load_file=file):
        found = {d.path: (d.strategy, d.source) for d in shard(step).plan(PARAMS, X).inputs}
        other = shard(lambda y: y * 2)
        assert other(jnp.ones(8)).shape == (8,)  # no rule speaks of it, and that is no error
        assert any(
            note.startswith(f"{file} has 2 rules that match no array") for note in other.plan(jnp.ones(8)).diagnostics
        )
    assert (found["params/up"], found["params/down"]) == (((1, 4), "file"), ((4, 1), "file"))
    assert found["x"][1] == "searched"  # only parameters were saved
    config = {"load_file": "", "save_file": file, "only_trainable_params": False}
    with auto_parallel(strategy_ckpt_config=config):
        assert shardfn.mindspore.get_auto_parallel_context("strategy_ckpt_config") == config
        assert shardfn.mindspore.get_auto_parallel_context("strategy_ckpt_save_file") == file
        shard(step, **asked).plan(PARAMS, X)
    with auto_parallel(strategy_ckpt_config={"load_file": file}):
        assert {d.source for d in shard(step).plan(PARAMS, X).inputs} == {"file"}


def test_an_optimizers_state_is_no_parameter(tmp_path):
    def adam(params, state, x):
        new, value = step(params, x)
        return new, jax.tree.map(lambda m, p: 0.9 * m + p, state, {"mu": new, "nu": new}), value

    state = {"mu": PARAMS, "nu": PARAMS}
    with auto_parallel(strategy_ckpt_save_file=str(tmp_path / "s.json")):
        shard(adam, in_strategy=(None, None, None)).plan(PARAMS, state, X)
    assert set(json.loads((tmp_path / "s.json").read_text())["parallel_layout_item"]) == {"up", "down"}


# ---- recipes


@pytest.fixture(scope="module")
def planned():
    """The plan of each recipe for the small model of its family; it fits, or this fails."""
    from examples.models.recipes import planned

    return {name: planned(name) for name in recipes()}


def test_every_family_is_there():
    found = {name.split("/")[0]: set() for name in recipes()}
    for name in recipes():
        found[name.split("/")[0]].add(name.split("/")[1])
    assert set(found) == {"dlrm", "gpt2", "large-image", "llama", "llama-nnx", "mixtral", "resnet", "t5", "vit"}
    assert all(
        {"data-parallel", "fsdp", "tensor-parallel"} <= kinds for f, kinds in found.items() if f != "large-image"
    )


@pytest.mark.slow
def test_the_readme_of_the_recipes_is_true(planned, monkeypatch):
    from examples.models import recipes as module

    monkeypatch.setattr(module, "planned", planned.__getitem__)
    text = (pathlib.Path(module.recipes_folder()) / "README.md").read_text()
    assert module.readme() == text, "write it again: python -m examples.models.recipes"


@pytest.mark.slow
def test_recipes_do_what_they_say(planned):
    def strategy_of(name, path):
        return next(d.strategy for d in planned[name].inputs if d.path.endswith(path))

    assert strategy_of("llama/data-parallel", "0/mlp/up_proj/weight") == (1, 1)
    assert strategy_of("llama/fsdp", "0/mlp/up_proj/weight") == (1, 8)
    assert strategy_of("llama/tensor-parallel", "0/mlp/up_proj/weight") == (8, 1)
    assert strategy_of("llama/fsdp-tp", "0/mlp/up_proj/weight") == (4, 2)
    assert strategy_of("llama-nnx/fsdp-tp", "0/mlp/up_proj/kernel") == (2, 4)
    assert strategy_of("large-image/height-width", "image") == (4, 2, 1)
    for name, plan_ in planned.items():
        tree = [d for d in plan_.inputs if d.path.split("/")[0] in ("params", "state")]
        share = sum(d.local_bytes for d in tree) / max(1, sum(d.local_bytes * np.prod(d.strategy) for d in tree))
        if "data-parallel" in name or not tree:
            assert share == 1 or not tree
        else:
            assert share < 0.75, name  # the arrays that the recipe is about are sharded
        assert [d.source for d in plan_.inputs] == ["file"] * len(plan_.inputs)


@pytest.mark.slow
def test_experts_stored_one_by_one_are_known():
    from examples.models import abstract, named

    fn, args = abstract(lambda: named.mixtral(layers=1, experts=2, stacked=False))
    for kind in ("data-parallel", "fsdp", "tensor-parallel", "fsdp-tp"):
        assert check_layout(f"mixtral/{kind}", fn, args, device="cpu:8") == ()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2/fsdp-tp", marks=pytest.mark.slow),
        pytest.param("mixtral/fsdp-tp", marks=pytest.mark.slow),
        "dlrm/data-rows",
        "large-image/height-width",
    ],
)
def test_recipes_compute_what_the_unsharded_step_computes(name):
    from examples.models import named

    fn, args = {"gpt2": lambda: named.gpt2(layers=1), "mixtral": lambda: named.mixtral(layers=1), "dlrm": named.dlrm,
                "large-image": named.large_image}[name.split("/")[0]]()  # fmt: skip
    got, wanted = shard(fn, layout=name)(*args), jax.jit(fn)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, wanted)


def test_the_wheel_has_them():
    text = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
    wheel = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"layouts": "shardfn/layouts"}


# ---- a file from an untrusted hand

REFUSED = {
    "no TOML": ("=", "is not valid TOML"),
    "another format": ('format = "x"', "is not a layout file"),
    "a newer version": ('format = "shardfn-layout"\nversion = 3', "of a newer version"),
    "an unknown key": ("include = 'other.toml'", "have no key `include`"),
    "a grid of text": ("mesh = 'data'", "`mesh` must be a table"),
    "two sizes left": ("[mesh]\na = 'left'\nb = 'left'", "two axes are left"),
    "a size of nothing": ("[mesh]\na = 0", "must be an int from 1"),
    "a size beyond all": ("[mesh]\na = 99999999999999999999", "must be an int from 1"),
    "a name that is none": ("[mesh]\n'a b' = 2", "no name of a mesh axis"),
    "no grid": ("[arguments]\nx = ['data']", "there is no [mesh]"),
    "axes and numbers": ("[mesh]\na = 2\n[arguments]\nx = ['a']\ny = [2]", "names mesh axes and `y` gives numbers"),
    "a float": ("[arguments]\nx = [1.5]", "is no entry of a dimension"),
    "a bool": ("[arguments]\nx = [true]", "is no entry of a dimension"),
    "nought": ("[arguments]\nx = [0]", "is no entry of a dimension"),
    "a date": ("[arguments]\nx = 2020-01-01", "is no sharding"),
    "dots twice": ("[arguments]\nx = ['...', '...']", "occurs twice"),
    "a rule of nothing": ("[arguments]\nx = {}", "a rule has no sharding"),
    "a dim that is none": ("[arguments]\nx = {dims = ['a'], sharding = {b = 1}}", "is no dim of the rule"),
    "a long path": (f"[arguments]\n'{'x' * 500}' = [1]", "too long"),
    "many stars": (f"[arguments]\n'{'*a' * 50}' = [1]", "too many *"),
    "ranks twice": ("order = [0, 0]\n[mesh]\na = 2", "every device once"),
    "an order of another grid": ("order = [0, 1]\n[mesh]\na = 4", "does not list the devices"),
    "deep": ("[arguments]\nx = " + "[" * 5000, "nested too deep"),
    "deep over lines": ("[arguments]\nx = " + "[\n" * 5000, "nested too deep"),
    "a dotted key": ("a" + ".a" * 4000 + " = 1", "nested too deep"),
    "a quoted dotted key": ('"a"' + '."a"' * 4000 + " = 1", "nested too deep"),
    "a level": ("level = 9", "must be one of"),
    "half of what is inside": ("[[constraints]]\nop = 'dot'", "is not complete"),
    "no numbers inside": (
        "[[constraints]]\nop = 'dot'\nequation = [1, true]\nline = ''\noperands = []\nresults = []",
        "an int or a list of them",
    ),
}


@pytest.mark.parametrize(("text", "what"), REFUSED.values(), ids=REFUSED)
def test_refused(text, what):
    head = "" if "format" in text else 'format = "shardfn-layout"\nversion = 2\n'
    assert any(what in told for told in wrong(head + text)), wrong(head + text)


def test_what_cannot_be_read(tmp_path):
    (tmp_path / "big.toml").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for source, what in (
        (tmp_path / "big.toml", "too large"), (tmp_path / "bytes.toml", "not UTF-8"), (tmp_path, "cannot be read|no layout"),
        ("../pyproject", "there is no layout"), ("", "there is no layout"), ("a\0b.toml", "cannot be read"), (3, "not an int"),
        ("llama/../llama/fsdp", "there is no layout"),
    ):  # fmt: skip
        with pytest.raises(ShardError, match=what):
            load_layout(source)
    with pytest.raises(ShardError, match="cannot be written"):
        write_layout(LayoutFile(), tmp_path / "no" / "layout.toml")
    assert not list(tmp_path.glob(".*"))


def test_parse_version_1_reads_its_keys():
    old = BY_HAND.replace("version = 2", "version = 1").replace("[mesh]", "[grid]").replace("sharding =", "cut =")
    old = old.replace('"replicated"', '"whole"')
    assert made(old) == made(BY_HAND) and "[grid]" in old and "cut =" in old


@pytest.mark.parametrize("level", [2, '"time"'])
def test_parse_level_by_number_or_word(level):
    assert made(f"level = {level}\n{BY_HAND}").level == 2
    assert 'level = "time"' in to_toml(made(f"level = {level}\n{BY_HAND}"))


def test_errors_name_file_and_line():
    problems: list[Problem] = []
    text = BY_HAND + '"a/*" = [1.5]\n"b" = ["data", 1]\n'
    parse_toml(text, "layout.toml", problems)
    line = text.splitlines().index('"a/*" = [1.5]') + 1
    assert [p.where for p in problems] == [f"layout.toml:{line}: arguments.a/* = [1.5]"]
    fit = check_layout(made(text.replace("[1.5]", '["rows"]')), {"a/c": X, "b": X}, device="cpu:8")
    assert f"layout.toml:{line}: [arguments] 'a/*'" in fit[-1].where


def test_globs_cannot_blow_up():
    stars = "".join(f'"{"*a" * 15}{i}" = {{ sharding = [1], optional = true }}\n' for i in range(1000))
    layout = made('format = "shardfn-layout"\nversion = 2\nothers = "replicated"\n[arguments]\n' + stars)
    tree = {f"{'a' * 300}{i}b": jax.ShapeDtypeStruct((8,), "float32") for i in range(20)}
    start = time.process_time()
    layout_shardings(layout, tree, 8)
    many = "".join(f'"p{i}" = [1]\n' for i in range(19_000))
    with pytest.raises(ShardError, match="more rules that match no array"):
        layout_shardings(made('format = "shardfn-layout"\nversion = 2\n[arguments]\n' + many), tree, 8)
    assert time.process_time() - start < 20


WORDS = ["format", "version", "mesh", "arguments", "=", "[", "]", "{", "}", '"', "'", "1", "left", "data", ".", "\n", "...", "[[",
         "constraints", "sources", ",", "#", "9" * 5000, "\\u0000", "\0", "-1", "1e400", "2020-01-01", "true", "*" * 40, "é", "\ud7ff"]  # fmt: skip


@pytest.mark.slow
@given(st.lists(st.sampled_from(WORDS), max_size=60).map("".join) | st.text(max_size=200), st.booleans())
@example("a = [" * 400, True)
def test_any_text_is_read_or_refused(text, begins_well):
    head = 'format = "shardfn-layout"\nversion = 2\n[mesh]\ndata = 4\n[arguments]\n' if begins_well else ""
    problems: list[Problem] = []
    layout = parse_toml(head + text, "any", problems)
    assert layout is not None or problems
    assert all(p.what and p.fix and len(str(p)) < 3000 for p in problems)
    if layout is not None:
        held_against_a_tree(layout)


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["w1", "dev_matrix", "tensor_map", "tensor_shape", "opt_weight_shard_size", "opt_weight_shard_step", "field"]), inner, max_size=6),
    max_leaves=20,
)  # fmt: skip
ITEM = st.fixed_dictionaries(
    {"dev_matrix": st.lists(st.integers(0, 4), max_size=4), "tensor_map": st.lists(st.integers(-2, 3) | st.lists(st.integers(-1, 3), max_size=2), max_size=3)},
    optional={"opt_weight_shard_size": st.integers(-1, 8), "opt_weight_shard_step": st.integers(-1, 8), "tensor_shape": DATA},
)  # fmt: skip


@given(DATA | st.dictionaries(st.text(max_size=3), ITEM, min_size=1, max_size=3))
def test_any_json_is_read_or_refused(data):
    from shardfn.layoutfile.mindspore_json import parse_json

    problems: list[Problem] = []
    layout = parse_json(json.dumps({"parallel_layout_item": data}), "any", problems)
    assert (layout is None) == bool(problems)
    if layout is not None:
        held_against_a_tree(layout)


def held_against_a_tree(layout):
    try:
        layout_shardings(
            layout, {"w": jax.ShapeDtypeStruct((8, 4), "float32"), "w1": jax.ShapeDtypeStruct((2,), "int32")}, 4
        )
    except ShardError as error:
        assert error.problems


NAMES = st.sampled_from(["data", "model", "x"])
DIMS = st.lists(st.just(1) | NAMES | st.lists(NAMES, min_size=2, max_size=2, unique=True).map(tuple), max_size=4).map(
    tuple
)
PATHS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
RULES = st.lists(
    st.builds(LayoutRule, PATHS, st.none() | DIMS, optional=st.booleans()), max_size=4, unique_by=lambda r: r.glob
).map(tuple)
SPECS = st.none() | st.lists(st.sampled_from([(), ("data",), ("data", "model")]), max_size=3).map(tuple)
HELD = st.builds(Constraint, st.sampled_from(["dot_general", "add"]), st.integers(0, 999), st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
                 st.lists(SPECS, max_size=3).map(tuple), st.lists(SPECS, max_size=2).map(tuple))  # fmt: skip
ALIKE = st.builds(Constraint, st.just("add"), st.integers(0, 9), st.just("a.py:1"), st.just((None,)), st.just((((),),)))
FILES = st.builds(
    LayoutFile,
    mesh=st.just((("data", None), ("model", 4), ("x", 2))),
    arguments=RULES,
    results=RULES,
    activations=RULES,
    constraints=st.lists(HELD | ALIKE, max_size=3).map(tuple),
    others=st.none() | DIMS,
    batch=st.none() | DIMS,
    about=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    level=st.none() | st.integers(0, 2),
    sources=st.lists(st.builds(DecisionSource, NAMES, st.text(st.characters(exclude_categories=["Cs"]), max_size=9), st.lists(PATHS, max_size=30).map(tuple)), max_size=2).map(tuple),
)  # fmt: skip


@given(FILES)
def test_what_is_written_is_read(layout):
    assert made(to_toml(layout)) == layout


@given(PATHS)
def test_a_path_meets_itself_and_nothing_else(path):
    from shardfn.frontend.paths import normal
    from shardfn.frontend.strategy import Leaf
    from shardfn.planning.layout_rules import match_rules

    leaves = [
        Leaf(path, "", (8,), "float32"),
        Leaf(path + "x", "", (8,), "float32"),
        Leaf("other", "", (8,), "float32"),
    ]
    met = match_rules(LayoutFile(arguments=(LayoutRule(escaped(path), (1,)),)), "arguments", leaves, problems := [])
    if normal(path):
        assert set(met) == {
            i
            for i, leaf in enumerate(leaves)
            if normal(path) in (normal(leaf.path), normal(leaf.path).split("/", 1)[-1])
        }
        assert problems == [] or not met


def test_errors_hold_nothing_that_a_terminal_obeys():
    text = 'format = "shardfn-layout"\nversion = 2\n[arguments]\n"a\\u001b[2J" = [1]\n"b\\u001b" = [1.5]\n'
    assert all("\x1b" not in what for what in wrong(text))
    with pytest.raises(ShardError) as caught:
        layout_shardings(made(text.rsplit('"b', 1)[0]), {"w": X}, 8)
    assert "\x1b" not in str(caught.value)


def test_loading_takes_what_there_is():
    plan_ = plan(step, PARAMS, X, **ASKED["given"])
    assert read_layout(plan_) == plan_
    assert read_layout(read_layout(plan_)) is not None
    with pytest.raises(TypeError):
        hash(read_layout(plan_))


def test_a_grid_for_other_devices_is_one_problem_however_many_arrays_there_are(tmp_path):
    shape = jax.ShapeDtypeStruct((64, 64), "float32")

    def product(p, x):
        for w in p:
            x = x @ w
        return x

    args = [shape] * 6, shape
    shardfn.plan(product, *args, device="h100:16", style="fsdp").save(tmp_path / "pod.toml")
    with pytest.raises(shardfn.ShardError) as caught:
        shardfn.plan(product, *args, device="h100:8", layout=tmp_path / "pod.toml")
    assert [p.what for p in caught.value.problems] == [
        f"the mesh of {tmp_path / 'pod.toml'} has 16 devices, but there are 8"
    ]


def test_attribute_of_a_plan_on_a_layout_says_how_to_get_the_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan(step, PARAMS, X, device="tpu-v5e:2x2", style="fsdp").save("layout.toml")
    layout = load_layout("layout.toml")
    for name in ("why", "cost", "collectives"):  # a method, a field and a property
        with pytest.raises(AttributeError, match="a layout holds shardings, not the function") as error:
            getattr(layout, name)
        assert not hasattr(layout, name)
    fix = str(error.value).partition("; fix: ")[2].replace("...", "'tpu-v5e:2x2'").removesuffix(".collectives")
    found = eval(fix, {"plan": plan, "f": step, "args": (PARAMS, X), "layout": layout})
    assert found.collectives and found.why("x", most=1).rows


def test_misspelt_attribute_of_a_layout_is_no_matter_of_plans():
    with pytest.raises(AttributeError, match=r"^a layout has no attribute 'meshes'$"):
        getattr(LayoutFile(), "meshes")  # noqa: B009


def _moved(x):
    rows = jnp.repeat(x, 3, axis=1)
    turned = jnp.flip(rows, 0)
    framed = jnp.pad(turned, ((1, 2), (1, 0)), mode="maximum")
    return sum((leaf**2).sum() for leaf in (framed, x.at[9::-2].set(1.5), turned.at[:, 0].set(0.5)))


def test_what_is_held_in_a_program_of_shifts_is_saved(tmp_path):
    """Ops of shifts have other numbers than those that the user wrote, and workarounds change no number."""
    args = [jax.ShapeDtypeStruct((64, 64), "float32")]
    first = plan(jax.value_and_grad(_moved), *args, device="h100:64", level="memory")
    assert first.constraints and all(constraint.shifts for constraint in first.constraints)
    first.save(tmp_path / "layout.toml")
    assert "shifts = true" in (tmp_path / "layout.toml").read_text()
    again = plan(jax.value_and_grad(_moved), *args, layout=tmp_path / "layout.toml", device="h100:64")
    assert again.cost == first.cost and again.constraints == first.constraints
    (tmp_path / "layout.toml").write_text((tmp_path / "layout.toml").read_text().replace("shifts = true", "shifts = 1"))
    with pytest.raises(ShardError, match="not complete"):
        load_layout(tmp_path / "layout.toml")


def test_an_open_dimension_beside_a_file_is_chosen_with_the_constraints_of_the_file(tmp_path):
    """They are of the function as written; the search itself is of shifts."""

    def added(p, x):
        h = x @ p["w"]
        return (h.at[1:].add(h[:-1]) @ p["v"]).sum()

    args = {k: jax.ShapeDtypeStruct((64, 64), "float32") for k in "vw"}, jax.ShapeDtypeStruct((32, 64), "float32")
    asked = {"device": "h100:8", "in_strategy": (AUTO, (4, AUTO))}
    first = plan(added, *args, level="memory", **asked)
    assert first.constraints
    first.save(tmp_path / "layout.toml")
    again = plan(added, *args, layout=tmp_path / "layout.toml", **asked)
    assert again.cost == first.cost


def test_an_array_that_a_file_leaves_open_is_searched_with_the_constraints_of_the_file(tmp_path):
    def added(x, v, w):
        h = x @ w
        return (h.at[1:].add(h[:-1]) @ v).sum()

    args, path = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3, tmp_path / "layout.toml"
    first = plan(added, *args, level="memory", device="h100:8")
    assert first.constraints
    first.save(path)
    path.write_text(re.sub(r'"?w"? = .*\n', "", path.read_text()))
    again = answered_call(plan(added, *args, layout=path, device="h100:8"))
    searched = dataclasses.replace(again.answer, constraints={})
    held = again.posed.problem.evaluate_answer(searched)
    assert again.problem.specs.count(None) == 1 and held == again.posed.problem.evaluate_answer(again.answer)
    without = answered_call(plan(added, *args, device="h100:8", level="memory")).posed.problem
    assert without.evaluate_answer(searched) != held
