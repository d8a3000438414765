"""`plan.code()`: Python that runs without shardfn, gives the plan's results and shards them as planned."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import search
from shardfn.errors import StrategyError
from shardfn.ir.model import OpConstraint
from shardfn.search.problem import Answer

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(32, 8)), jnp.float32)
PARAMS = {"dense": {"w": W, "b": jnp.zeros(8)}, "layers": [W, None], "scale": (jnp.ones(()),)}
OPTIMIZER = optax.adam(1e-2)
State = collections.namedtuple("State", ["w", "count"], module="__main__")  # pytest gives its own modules no parents


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["name"])
@dataclasses.dataclass(frozen=True)
class Model:
    w: jax.Array
    name: str


def product(x, w):
    return x @ w


def scaled(x, w, *, scale, flag=False):
    return (x @ w) * scale if flag else x


def tree(params, x):
    y = x @ params["dense"]["w"] + params["dense"]["b"] + x @ params["layers"][0]
    return {"y": y * params["scale"][0], "none": None}, [y.sum()]


def adam(w, state, x):
    gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    updates, state = OPTIMIZER.update(gradient, state)
    return optax.apply_updates(w, updates), state


def named(state, x):
    return State(state.w + x.T @ x[:, :8], state.count + 1)


def of_model(model, x):
    return dataclasses.replace(model, w=model.w * 2), x @ model.w


CASES = {
    "given": (product, (X, W), {}, {"in_strategy": ((4, 1), (1, 2))}),
    "searched": (product, (X, W), {}, {}),
    "one argument": (jnp.tanh, (X,), {}, {"in_strategy": ((2, 4),)}),
    "lambda": (lambda x: x + 1, (X,), {}, {"in_strategy": ((2, 4),)}),
    "keywords": (scaled, (X, W), {"scale": jnp.ones(()), "flag": True}, {"static_argnames": "flag"}),
    "static": (lambda x, n: x**n, (X, 3), {}, {"static_argnums": 1}),
    "donated": (lambda w, x: w + (x.T @ x)[:, :8], (W, X), {}, {"donate_argnums": 0}),
    "pytree": (tree, (PARAMS, X), {}, {"style": "fsdp"}),
    "optax": (adam, (W, OPTIMIZER.init(W), X), {}, {"style": "zero1"}),
    "named tuple": (named, (State(W, jnp.zeros(())), X), {}, {}),
    "class": (of_model, (Model(W, "a"), X), {}, {"style": "fsdp"}),
    "one device": (product, (X, W), {}, {"device": jax.devices()[0]}),
    "rest of a mesh": (product, (X, W), {}, {"in_strategy": ((2, 1), (1, 2))}),
}


def run(made, function, args, kwargs, arguments=None):
    """The results of the generated code, and its namespace."""
    name = function.__name__ if function.__name__.isidentifier() else "f"
    space: dict[str, Any] = {name: function, "State": State, **(arguments or {})}
    exec(made.code(), space)
    statics = {k for k in kwargs if isinstance(kwargs[k], bool)}
    ordered = [*args, *(kwargs[k] for k in kwargs if k not in statics), *(kwargs[k] for k in kwargs if k in statics)]
    found = space["sharded"](*jax.tree.map(lambda a: jnp.array(a) if isinstance(a, jax.Array) else a, ordered))
    return found, space


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.parametrize("name", CASES)
def test_the_code_gives_the_plans_results(name):
    function, args, kwargs, options = CASES[name]
    sharded: Any = shardfn.shard(function, **options)
    made = sharded.plan(*args, **kwargs)
    code = made.code()
    assert "import shardfn" not in code and max(map(len, code.splitlines())) <= 140
    found, _ = run(made, function, args, kwargs, dict(zip(("model", "x"), args, strict=False)) if name == "class" else None)  # fmt: skip
    copies = jax.tree.map(lambda a: jnp.array(a) if isinstance(a, jax.Array) else a, args)
    same(found, sharded(*copies, **kwargs))


def test_classes_have_public_names_and_others_their_argument():
    optimizer = shardfn.plan(adam, W, OPTIMIZER.init(W), X, style="zero1").code()
    assert "optax.ScaleByAdamState(count=P()" in optimizer and "_src" not in optimizer
    model = shardfn.plan(of_model, Model(W, "a"), X, style="fsdp").code()
    assert "jax.tree.unflatten(jax.tree.structure(model), [" in model and "# model/w" in model


def test_mesh_of_the_user():
    devices = np.array(jax.devices())[::-1].reshape(2, 4)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharded = shardfn.shard(product, (P("data"), P(None, "model")), device=mesh)
    made = sharded.plan(X, W)
    assert '("data", "model")' in made.code() and "for i in [7, 6, 5, 4, 3, 2, 1, 0]]" in made.code()
    found, space = run(made, product, (X, W), {})
    assert space["mesh"] == mesh and found.sharding == sharded(X, W).sharding


def test_targets_have_their_mesh():
    shapes = (jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 64), "float32"))
    made = shardfn.plan(product, *shapes, in_strategy=((4, 1), (1, 4)), device="tpu-v5e:4x4")
    assert 'jax.make_mesh((4, 4), ("a", "b")' in made.code()
    compile(made.code(), "code", "exec")


def constrained(problem):
    """Arguments replicated, and rows of each matmul sharded by a constraint."""
    ops = {i: op for i, op in enumerate(problem.graph.ops) if i in problem.can_constrain and op.name == "dot_general"}
    constraints = {i: OpConstraint((None,) * len(op.inputs), ((("a",), ()),)) for i, op in ops.items()}
    shapes = tuple(((),) * len(shape) for shape in problem.shapes)
    return Answer((("a", 8),), shapes, ("",) * len(shapes), "constrained", constraints=constraints)


@pytest.fixture
def _constrained():
    search.register("constrained", constrained)
    yield
    search.forget("constrained")


NAMES = {}


def with_constraint(x, w):
    y = x @ w
    if NAMES:  # as a reader writes the constraint of this line
        y = jax.lax.with_sharding_constraint(y, *NAMES.values())
    return jnp.sin(y)


@pytest.mark.usefixtures("_constrained")
def test_constraints_are_named_by_their_lines():
    sharded = shardfn.shard(with_constraint, search_mode="constrained")
    made = sharded.plan(X, W)
    line = with_constraint.__code__.co_firstlineno + 1
    assert (
        len(made.constraints) == 1 and f"# test_plain_jax.py:{line}, result of a dot_general, f32[16, 8]" in made.code()
    )
    said = "# 1 constraint is NOT applied below; plan.apply(with_constraint) applies it."
    assert made.code().splitlines()[1] == said
    space: dict[str, Any] = {"with_constraint": with_constraint}
    exec(made.code(), space)
    NAMES["y"] = space[f"test_plain_jax_{line}"]
    try:
        lowered = space["sharded"].lower(X, W)
        assert lowered.as_text().count("sharding_constraint") == 1
        same(space["sharded"](X, W), sharded(X, W))
    finally:
        NAMES.clear()


@pytest.mark.usefixtures("_constrained")
def test_constraints_of_the_backward_pass_are_comments():
    step = jax.grad(lambda w, x: (jnp.sin(x @ w) ** 2).sum(), (0, 1))
    made = shardfn.plan(step, W, X, search_mode="constrained")
    code = made.code()
    assert len(made.constraints) == 3 and code.count("of the backward pass") == 2
    assert len(re.findall(r"^test_plain_jax_\d+ = NamedSharding", code, re.M)) == 1
    exec(code, {"f": step, made.function: step})


def test_what_only_apply_does_is_said():
    made = shardfn.plan(lambda x: x[2:] - x[:-2], jnp.ones((18, 4)), in_strategy=((2, 1),))
    assert "# plan.apply also sends halos" in made.code()


def test_a_pickled_plan_is_refused():
    import copy
    import pickle

    made = pickle.loads(pickle.dumps(copy.copy(shardfn.plan(product, X, W, in_strategy=((4, 1), (1, 2))))))
    with pytest.raises(StrategyError, match="it was pickled"):
        made.code()
