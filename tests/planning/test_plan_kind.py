"""The textbook names of plans, on layouts written by hand and on plans of small functions."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.planning.plan_kind import Layouts, kind_of

A, B, NONE = frozenset("a"), frozenset("b"), frozenset()
ONE, TWO = (("a", 8),), (("a", 4), ("b", 2))
LAYOUTS = {
    "one device": Layouts(()),
    "replicated on 8 devices": Layouts(ONE, parameters=((64, NONE),)),
    "data parallel over 8 devices": Layouts(ONE, A, parameters=((64, NONE),)),
    "FSDP over 8 devices": Layouts(ONE, A, parameters=((64, A), (1, NONE)), optimizer_state=((64, A),)),
    "ZeRO-1 over 8 devices": Layouts(ONE, A, parameters=((64, NONE),), optimizer_state=((64, A),)),
    "tensor parallel over 8 devices": Layouts(ONE, parameters=((64, A), (32, NONE))),
    "tensor parallel over 2 × data parallel over 4": Layouts(TWO, A, parameters=((64, B),)),
    "FSDP over 4 × tensor parallel over 2": Layouts(TWO, A, parameters=((64, A | B),)),
    "FSDP over 8 ": Layouts(TWO, A | B, parameters=((64, A | B),)),
    "data parallel over 4 × replicated over 2": Layouts(TWO, A, parameters=((64, NONE),)),
    "mixed: data parallel with 50% of the parameter bytes sharded over 8": Layouts(
        ONE, A, parameters=((64, A), (64, NONE))
    ),
    "mixed: 25% of the parameter bytes sharded over 8": Layouts(ONE, parameters=((16, A), (48, NONE))),
    "mixed: optimizer state sharded over 8": Layouts(ONE, parameters=((64, NONE),), optimizer_state=((64, A),)),
    "mixed: data parallel over 4 × stacked layers sharded over 2": Layouts(TWO, A, parameters=((64, B),), stacked=B),
    "mixed: inputs sharded along other dimensions than the batch over 8": Layouts(ONE, inputs=A),
}


@pytest.mark.parametrize(("name", "layouts"), LAYOUTS.items(), ids=list(LAYOUTS))
def test_kind_of_layouts_by_hand_is_the_textbook_name(name, layouts):
    assert kind_of(layouts).startswith(name)


def mlp(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


def step(params, momentum, x):
    grads = jax.grad(lambda p: jnp.mean(mlp(x, p["up"], p["down"]) ** 2))(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (((2, 1), (1, 4), (4, 1)), "tensor parallel over 4 × data parallel over 2"),
        (((8, 1), (1, 1), (1, 1)), "data parallel over 8 devices"),
        (((8, 1), (8, 1), (1, 8)), "FSDP over 8 devices"),
        (((1, 1), (1, 1), (1, 1)), "replicated on 8 devices"),
    ],
)
def test_plan_kind_of_a_forward_pass(strategy, kind):
    args = shaped(16, 32), shaped(32, 64), shaped(64, 32)
    assert shardfn.plan(mlp, *args, in_strategy=strategy, device="cpu:8").kind == kind


@pytest.mark.parametrize(
    ("params", "momentum", "x", "kind"),
    [
        ((8, 1), (8, 1), (8, 1), "FSDP over 8 devices"),
        ((1, 1), (8, 1), (8, 1), "ZeRO-1 over 8 devices"),
        ((1, 1), (1, 1), (8, 1), "data parallel over 8 devices"),
        ((4, 2), (4, 2), (4, 1), "FSDP over 4 × tensor parallel over 2"),
    ],
)
def test_plan_kind_of_a_training_step(params, momentum, x, kind):
    tree = {"up": shaped(64, 128), "down": shaped(128, 64)}
    made = shardfn.plan(step, tree, tree, shaped(32, 64), in_strategy=(params, momentum, x), device="cpu:8")
    assert made.kind == kind


def test_kind_of_results_sharded_alone_is_not_replicated():
    made = shardfn.plan(lambda: jnp.ones((24, 16)), out_strategy=((8, 1),), device="cpu:8")
    assert made.kind == "mixed: only results sharded over 8"


def test_kind_of_quantised_weights_is_tensor_parallel():
    x, w = jax.ShapeDtypeStruct((16, 32), "int8"), jax.ShapeDtypeStruct((32, 64), "int8")
    assert shardfn.plan(jnp.matmul, x, w, in_strategy=((1, 1), (1, 8)), device="cpu:8").kind.startswith(
        "tensor parallel"
    )
