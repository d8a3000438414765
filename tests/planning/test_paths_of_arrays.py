"""One form of paths for everything that names an array of a call, and the reason why one is replicated."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardfn
from shardfn import AUTO, train
from shardfn.errors import StrategyError


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


PARAMS = {
    "model": {"up": {"kernel": shaped(512, 256)}, "down": {"kernel": shaped(256, 512)}},
    "scale": shaped(512),
    "odd": shaped(7),
    "one": shaped(1),
}


def apply(params, x):
    y = x @ params["model"]["up"]["kernel"] @ params["model"]["down"]["kernel"]
    return {"y": y * params["scale"] + params["odd"].sum() + params["one"]}, params


@pytest.fixture(scope="module")
def made():
    return shardfn.plan(apply, PARAMS, shaped(512, 512), device="tpu-v5e:8")


FORMS = [
    "params/model/up/kernel",
    "params.model.up.kernel",
    "model/up/kernel",
    "up/kernel",
    "up.kernel",
    "['up']['kernel']",
]


@pytest.mark.parametrize("path", FORMS)
def test_every_question_takes_the_same_forms(made, path):
    full = "params/model/up/kernel"
    assert made.decision(path).path == full
    assert made.why(path, 1).planned.path == full
    assert made.draw("mesh", path).title.startswith(full)
    assert made.what_if({path: (1, 8)}).decision(full).strategy == (1, 8)
    given = shardfn.plan(apply, PARAMS, shaped(512, 512), device="tpu-v5e:8", parameter_plan={path: (1, 8)})
    assert given.decision(full).reason == f"parameter_plan[{path!r}]"


def test_results_by_their_path_or_end(made):
    assert made.decision("result/0/y").path == made.decision("y").path == "result/0/y"
    assert made.decision("result/1/scale").path == "result/1/scale"
    assert made.decision("scale").path == "params/scale", "arguments go first"


@pytest.mark.parametrize("ask", ["decision", "why", "draw", "what_if", "parameter_plan"])
def test_an_end_of_several_paths_is_refused_with_all_of_them(made, ask):
    with pytest.raises(StrategyError, match="did you mean 'params/model/down/kernel' or 'params/model/up/kernel'"):
        if ask == "draw":
            made.draw("mesh", "kernel")
        elif ask == "what_if":
            made.what_if({"kernel": (1, 8)})
        elif ask == "parameter_plan":
            shardfn.plan(apply, PARAMS, shaped(512, 512), device="tpu-v5e:8", parameter_plan={"kernel": (1, 8)})
        else:
            getattr(made, ask)("kernel")


@pytest.mark.parametrize(("ask", "wrong"), [("decision", "up/kernl"), ("why", "up/kernl"), ("decision", "sclae")])
def test_what_is_misspelt_has_a_suggestion(made, ask, wrong):
    with pytest.raises(StrategyError, match="did you mean"):
        getattr(made, ask)(wrong)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("odd", "no dimension of [7] divides over an axis of the mesh"),
        ("one", "it has one element, so no dimension can be sharded"),
        ("up/kernel", "the best other sharding tried, "),
    ],
)
def test_why_an_array_is_replicated(made, path, reason):
    held = made if path != "up/kernel" else shardfn.plan(
        apply, PARAMS, shaped(8192, 512), in_strategy=(AUTO, (8, 1)), device="tpu-v5e:8"
    )  # fmt: skip
    found = held.decision(path)
    assert not any(found.spec)
    assert found.reason.startswith("replicated: ") and reason in found.reason


def test_a_sharded_array_keeps_the_reason_of_the_plan(made):
    for d in (*made.inputs, *made.outputs):
        if any(d.spec):
            assert made.decision(d.path) == d


def test_reports_of_a_step_print_the_keys_that_the_user_wrote():
    def loss(params, x):
        return ((x @ params["dense"]["w"]) ** 2).mean()

    step = train.step(loss, optax.sgd(0.1), mode="auto_parallel", in_strategy=((8, 1),), parameter_plan={"w": (1, 1)})
    state = step.init({"dense": {"w": jnp.ones((16, 16))}}, jnp.ones((8, 16)))
    made = step.plan(state, jnp.ones((8, 16)))
    reasons = {d.path: d.reason for d in made.inputs}
    assert reasons["batch/0"] == "in_strategy[0]" and reasons["state/params/dense/w"] == "parameter_plan['w']"
    wrong = train.step(loss, optax.sgd(0.1), mode="auto_parallel", in_strategy=((3, 1),))
    with pytest.raises(StrategyError, match=r"in_strategy\[0\] = \(3, 1\)"):
        wrong.init({"dense": {"w": jnp.ones((16, 16))}}, jnp.ones((8, 16)))


def test_the_end_of_a_parameters_path_names_it_beside_its_moments():
    def step(state, x):
        params, moments = state["params"], state["mu"]
        grads = jax.grad(lambda p: jnp.sum((x @ p["net"]["w"] + p["net"]["b"]) ** 2))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return {"params": jax.tree.map(lambda p, m: p - m, params, moments), "mu": moments}

    params = {"net": {"w": jnp.ones((8, 16)), "b": jnp.ones(16)}}
    made = shardfn.plan(step, {"params": params, "mu": params}, jnp.ones((16, 8)))
    assert made.decision("w").path == "state/params/net/w"
    assert made.why("b").planned.path == "state/params/net/b"
    with pytest.raises(shardfn.ShardError, match="names 2 arrays"):
        shardfn.plan(lambda a, b: a["w"] @ b["w"], {"w": jnp.ones((8, 8))}, {"w": jnp.ones((8, 8))}).decision("w")
