"""The textbook names of plans, on layouts written by hand and on plans of small functions."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import AUTO, REPLICATED
from shardfn.planning.plan import Layouts, kind_of

A, B, NONE = frozenset("a"), frozenset("b"), frozenset()
ONE, TWO = (("a", 8),), (("a", 4), ("b", 2))
LAYOUTS = {
    "one device": Layouts(()),
    "replicated on 8 devices": Layouts(ONE, parameters=((64, NONE),)),
    "data parallel over 8 devices": Layouts(ONE, A, parameters=((64, NONE),)),
    "FSDP over 8 devices": Layouts(
        ONE, A, parameters=((64, A), (1, NONE)), gathered=((64, A), (1, NONE)), optimizer_state=((64, A),)
    ),
    "ZeRO-1 over 8 devices": Layouts(ONE, A, parameters=((64, NONE),), optimizer_state=((64, A),)),
    "ZeRO-2 over 8 devices": Layouts(ONE, A, parameters=((64, NONE),), optimizer_state=((64, A),), scattered=A),
    "ZeRO-1 over 4 × data parallel over 2": Layouts(
        TWO, A | B, parameters=((64, NONE),), optimizer_state=((64, A),), scattered=B
    ),
    "tensor parallel over 8 devices": Layouts(ONE, parameters=((64, A), (32, NONE))),
    "tensor parallel over 2 × data parallel over 4": Layouts(TWO, A, parameters=((64, B),)),
    "FSDP over 4 × tensor parallel over 2": Layouts(TWO, A, parameters=((64, A | B),), gathered=((64, A),)),
    "FSDP over 8 ": Layouts(TWO, A | B, parameters=((64, A | B),), gathered=((64, A | B),)),
    "mixed: batch and weights sharded together over 8 devices": Layouts(ONE, A, parameters=((64, A),)),
    "expert parallel over 2 × data parallel over 4": Layouts(TWO, A, parameters=((64, B),), experts=B),
    "data parallel over 4 × replicated over 2": Layouts(TWO, A, parameters=((64, NONE),)),
    "mixed: batch and 50% of the weights sharded over 8 devices": Layouts(ONE, A, parameters=((64, A), (64, NONE))),
    "mixed: 25% of the weights sharded over 8 devices": Layouts(ONE, parameters=((16, A), (48, NONE))),
    "mixed: optimizer state alone sharded over 8 devices": Layouts(
        ONE, parameters=((64, NONE),), optimizer_state=((64, A),)
    ),
    "mixed: data parallel over 4, layers of a loop sharded over 2 devices": Layouts(
        TWO, A, parameters=((64, B),), stacked=B
    ),
    "mixed: data parallel over 4, operations inside sharded over 2 devices": Layouts(TWO, A, used=A | B),
    "rows sharded 4 ways × columns sharded 2 ways": Layouts(TWO, A, dimensions=(("a", "rows"), ("b", "columns"))),
    "dimension 2 sharded 4 ways × replicated on 2 devices": Layouts(TWO, A, dimensions=(("a", "dimension 2"),)),
    "columns sharded 4 ways × operations inside sharded on 2": Layouts(
        TWO, A, used=A | B, dimensions=(("a", "columns"),)
    ),
    "mixed: inputs sharded along other dimensions than the batch over 8": Layouts(ONE, inputs=A),
}


@pytest.mark.parametrize(("name", "layouts"), LAYOUTS.items(), ids=list(LAYOUTS))
def test_kind_of_layouts_by_hand_is_the_textbook_name(name, layouts):
    assert kind_of(layouts).startswith(name)


def shaped_arrays(*shapes):
    return tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)


ARRAY_PROGRAMS = {
    "stencil": (
        lambda u: u + jnp.roll(u, 1, 0),
        ((64, 32),),
        ((4, 2),),
        "rows sharded 4 ways × columns sharded 2 ways",
    ),
    "transform": (lambda u: jnp.fft.fft(u).real, ((64, 32),), ((8, 1),), "rows sharded 8 ways"),
    "power iteration": (lambda a, v: a @ v, ((64, 64), (64,)), ((8, 1), (1,)), "rows sharded 8 ways"),
    "bodies": (lambda x: x - x.mean(0), ((64, 8),), ((1, 8),), "columns sharded 8 ways"),
    "volume": (lambda u: u * 2, ((8, 8, 16),), ((1, 1, 8),), "dimension 2 sharded 8 ways"),
    "factorisation": (jnp.linalg.cholesky, ((64, 64),), ((8, 1),), "rows sharded 8 ways"),
    "nothing": (lambda u: u * 2, ((8, 8),), ((1, 1),), "replicated on 8 devices"),
    "weights": (lambda x, w: x @ w, ((64, 32), (32, 32)), ((8, 1), (1, 1)), "data parallel over 8 devices"),
}


@pytest.mark.parametrize("name", ARRAY_PROGRAMS)
def test_outside_neural_networks_the_kind_names_dimensions(name):
    function, shapes, entries, kind = ARRAY_PROGRAMS[name]
    assert shardfn.plan(function, *shaped_arrays(*shapes), in_strategy=entries, device="cpu:8").kind == kind


def mlp(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


def test_kind_names_no_axis_replicated_over_which_operations_inside_are_sharded():
    args = shaped(4096, 1024), shaped(1024, 4096), shaped(4096, 1024)
    made = shardfn.plan(
        mlp, *args, in_strategy=((2, 1), (1, 1), (1, 1)), search_mode="sharding_propagation", device="cpu:8"
    )
    unsharded = shardfn.plan(mlp, *args, device="cpu:1").cost.flops
    assert made.cost.flops == pytest.approx(unsharded / 8, rel=0.01) and "replicated" not in made.kind
    alone = shardfn.plan(mlp, *args, in_strategy=((2, 1), (1, 1), (1, 1)), device="cpu:8")
    assert alone.cost.flops == pytest.approx(unsharded / 2, rel=0.01) and alone.kind.endswith("× replicated over 4")


def test_kind_of_a_shard_map_counts_what_its_body_multiplies_as_weights():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data"))
    def matmul(x, w):
        return jax.lax.psum(x @ w, "model")

    entries = P("data", "model"), P("model")
    made = shardfn.plan(matmul, shaped(16, 32), shaped(32, 64), in_strategy=entries, device=mesh)
    assert made.kind == "tensor parallel over 4 × data parallel over 2"
    layers = shardfn.plan(lambda x, w, v: jnp.tanh(matmul(x, w)) @ v, shaped(16, 32), shaped(32, 64), shaped(64, 16),
                          style="data_parallel", device=mesh)  # fmt: skip
    assert [d.strategy for d in layers.inputs] == [(8, 1), (1, 1), (1, 1)]


def step(params, momentum, x):
    grads = jax.grad(lambda p: jnp.mean(mlp(x, p["up"], p["down"]) ** 2))(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum


BOTH = {"up": (4, 2), "down": (2, 4)}


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


def fused_attention(x, qkv, out):
    q, k, v = jnp.split(x @ qkv, 3, axis=-1)
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ v @ out


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (((2, 1, 1), (1, 4), (4, 1)), "tensor parallel over 4 × data parallel over 2"),
        (((8, 1, 1), (1, 1), (1, 1)), "data parallel over 8 devices"),
        (((8, 1, 1), (8, 1), (8, 1)), "FSDP over 8 devices"),
    ],
)
def test_kind_where_results_have_the_shape_of_the_batch_and_weights_are_square(strategy, kind):
    args = shaped(8, 16, 32), shaped(32, 96), shaped(32, 32)
    assert shardfn.plan(fused_attention, *args, in_strategy=strategy, device="cpu:8").kind == kind


@pytest.mark.parametrize(
    ("params", "momentum", "x", "kind"),
    [
        ((8, 1), (8, 1), (8, 1), "FSDP over 8 devices"),
        ((1, 1), (8, 1), (8, 1), "ZeRO-1 over 8 devices"),
        ((1, 1), (1, 1), (8, 1), "data parallel over 8 devices"),
        (BOTH, BOTH, (4, 1), "FSDP over 4 × tensor parallel over 2"),
    ],
)
def test_plan_kind_of_a_training_step(params, momentum, x, kind):
    tree = {"up": shaped(64, 128), "down": shaped(128, 64)}
    made = shardfn.plan(step, tree, tree, shaped(32, 64), in_strategy=(params, momentum, x), device="cpu:8")
    assert made.kind == kind


def experts(x, gate, w1, w2):
    tokens = jnp.einsum("te,td->etd", jax.nn.softmax(x @ gate), x)
    hidden = jax.nn.relu(jnp.einsum("etd,edf->etf", tokens, w1))
    return jnp.einsum("etf,efd->td", hidden, w2)


@pytest.mark.parametrize(
    ("x", "weights", "kind"),
    [
        ((1, 1), (8, 1, 1), "expert parallel over 8 devices"),
        ((8, 1), (8, 1, 1), "expert parallel over 8 devices"),
        ((2, 1), (4, 1, 1), "expert parallel over 4 × data parallel over 2"),
    ],
)
def test_kind_of_weights_sharded_by_expert_is_expert_parallel(x, weights, kind):
    args = shaped(64, 32), shaped(32, 8), shaped(8, 32, 128), shaped(8, 128, 32)
    made = shardfn.plan(experts, *args, in_strategy=(x, (1, 1), weights, weights), device="cpu:8")
    assert made.kind == kind


def test_kind_of_weights_that_stay_in_place_is_not_fsdp():
    """A long contraction over a short batch: XLA moves the activations, as the weights are larger."""
    made = shardfn.plan(jnp.matmul, shaped(8, 4096), shaped(4096, 4096), in_strategy=((8, 1), (8, 1)), device="cpu:8")
    gathered = {c.shape for c in made.collectives if c.kind == "all-gather"}
    assert ("FSDP" in made.kind) == ((512, 4096) in gathered)


def test_kind_of_results_sharded_alone_is_not_replicated():
    made = shardfn.plan(lambda: jnp.ones((24, 16)), out_strategy=((8, 1),), device="cpu:8")
    assert made.kind == "rows sharded 8 ways"


def test_kind_of_quantised_weights_is_tensor_parallel():
    x, w = jax.ShapeDtypeStruct((16, 32), "int8"), jax.ShapeDtypeStruct((32, 64), "int8")
    assert shardfn.plan(jnp.matmul, x, w, in_strategy=((1, 1), (1, 8)), device="cpu:8").kind.startswith(
        "tensor parallel"
    )


@pytest.mark.parametrize("style", ["fsdp", "zero1", "tensor_parallel"])
def test_kind_of_an_nnx_training_step_counts_its_optimizer_state(style):
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def make():
        layers = (nnx.Linear(*dims, use_bias=False, rngs=nnx.Rngs(0)) for dims in ((64, 256), (256, 64)))
        model = nnx.Sequential(*layers)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    plan = shardfn.plan(train_step, *nnx.eval_shape(make), shaped(32, 64), style=style, device="tpu-v5e:8")
    assert plan.kind.startswith({"fsdp": "FSDP over 8 ", "zero1": "ZeRO-1 over 8 "}.get(style, "tensor parallel over "))


@pytest.mark.slow
def test_kind_where_the_search_gathers_what_the_entries_shard_is_fsdp_and_the_headline_says_so():
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def make():
        model = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(256, 64, rngs=nnx.Rngs(0)))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    rules = {"model/layers/0/kernel": (1, 4), "model/layers/2/kernel": (4, 1)}
    entries = AUTO, AUTO, (2, 1)
    plan = shardfn.plan(train_step, *nnx.eval_shape(make), shaped(16384, 64), in_strategy=entries, parameter_plan=rules,
                        level="time", device="tpu-v5e:8")  # fmt: skip
    assert plan.kind == "FSDP over 4 × data parallel over 2"
    assert "weights are gathered (FSDP)" in plan.entries


@pytest.mark.parametrize("form", ["dict", "nested"])
def test_results_in_any_container_take_the_sharding_of_what_they_replace(form):
    def nested(params, momentum, x):
        params, momentum = step(params, momentum, x)
        return {"params": params, "momentum": momentum} if form == "dict" else ((params, momentum), jnp.sum(x))

    weights = {"up": shaped(64, 256), "down": shaped(256, 64)}
    plan = shardfn.plan(nested, weights, weights, shaped(32, 64), style="zero1", device="tpu-v5e:8")
    assert plan.kind == "ZeRO-1 over 8 devices"
    momenta = [d for d in plan.outputs if d.strategy.count(8)]
    assert len(momenta) == 2 and all("which it can replace" in d.reason for d in momenta)


def attention(x, wq, wk, wv, wo):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in (wq, wk, wv))
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
    return jnp.einsum("bhst,bthk,hkd->bsd", scores, v, wo)  # heads are a batch of its products with `wo`


@pytest.mark.parametrize("function", [attention, jax.grad(lambda *args: attention(*args).sum(), (1, 2, 3, 4))])
def test_kind_of_weights_sharded_by_head_is_tensor_parallel(function):
    args = shaped(4, 8, 32), *[shaped(32, 4, 8)] * 3, shaped(4, 8, 32)
    entries = (1, 1, 1), *[(1, 4, 1)] * 3, (4, 1, 1)
    assert shardfn.plan(function, *args, in_strategy=entries, device="cpu:4").kind == "tensor parallel over 4 devices"


@pytest.mark.parametrize(("weights", "rows"), [((4, 1), (2, 1)), ((8, 1), (1, 1))])
def test_kind_of_weights_stored_transposed_is_tensor_parallel(weights, rows):
    """As Equinox and PyTorch store them: the outputs of a layer are dimension 0 of its weight and of its bias."""
    args = shaped(128, 64), shaped(128), shaped(16, 64)
    entries = weights, weights[:1], rows
    kind = shardfn.plan(lambda w, b, x: x @ w.T + b, *args, in_strategy=entries, device="cpu:8").kind
    assert kind == f"tensor parallel over {weights[0]}" + (" × data parallel over 2" if rows[0] == 2 else " devices")


# ---- what is the batch, and what a parameter

TOKENS, WIDE = jax.ShapeDtypeStruct((128,), "int32"), (1024, 64)


def concatenated(params, cache, token):
    x = params["e"][token] @ params["w"]
    cache = jnp.concatenate([cache[:, 1:], x[:, None]], 1)
    return jnp.argmax(jnp.einsum("bte,be->be", cache, x) @ params["e"].T, -1), cache


def recurrent(params, cache, token):
    cache = cache + params["e"][token] @ params["w"]
    return cache @ params["w"], cache


def of_layers(params, cache, token, at):
    def layer(x, of_layer):
        w, k, v = of_layer
        k = jnp.concatenate([k[:, 1:], x[:, None]], 1)
        return x @ w + jnp.einsum("bt,bte->be", jnp.einsum("bte,be->bt", k, x), v), (k, v)

    x, (k, v) = jax.lax.scan(layer, params["e"][token] + params["at"][at], (params["w"], cache["k"], cache["v"]))
    return x @ params["e"].T, {"k": k, "v": v}


PARAMS, STACKED = {"e": shaped(*WIDE), "w": shaped(64, 64)}, {"k": shaped(4, 128, 16, 64), "v": shaped(4, 128, 16, 64)}
DECODING = {
    "cache": (concatenated, PARAMS, shaped(128, 16, 64), (8, 1, 1)),
    "state": (recurrent, PARAMS, shaped(128, 64), (8, 1)),
    "cache of stacked layers": (
        of_layers,
        {"e": shaped(*WIDE), "w": shaped(4, 64, 64), "at": shaped(256, 64)},
        STACKED,
        (1, 8, 1, 1),
    ),
}


@pytest.mark.parametrize("style", ["", "data_parallel", "fsdp"])
@pytest.mark.parametrize("name", DECODING)
def test_a_cache_that_comes_back_is_state_of_the_batch_and_no_parameter(name, style):
    step, params, cache, entry = DECODING[name]
    more = (jax.ShapeDtypeStruct((), "int32"),) * (name == "cache of stacked layers")
    options = {"style": style} if style else {"in_strategy": (REPLICATED, entry, (8,), *[REPLICATED] * len(more))}
    made = shardfn.plan(step, params, cache, TOKENS, *more, device="h100:8", **options)
    assert {d.strategy for d in made.inputs if d.path.startswith("cache")} == {entry}
    assert made.decision("token").strategy == (8,)
    if style != "fsdp":  # XLA looks rows up where they are
        assert (made.kind, made.cost.bytes_sent) == ("data parallel over 8 devices", 0)


@pytest.mark.parametrize("head", ["none", "tied", "untied"])
@pytest.mark.parametrize("tokens", [(128,), (128, 16)])
def test_data_parallel_shards_tokens_and_not_the_table_that_they_look_up(tokens, head):
    def model(e, w, u, t):
        x = jnp.tanh(e[t] @ w)
        return {"none": lambda: x, "tied": lambda: x @ e.T, "untied": lambda: x @ u}[head]()

    args = shaped(*WIDE), shaped(64, 64), shaped(64, 1024), jax.ShapeDtypeStruct(tokens, "int32")
    made = shardfn.plan(model, *args, style="data_parallel", device="h100:8")
    assert [d.strategy[0] for d in made.inputs] == [1, 1, 1, 8]
    assert (made.kind, made.cost.bytes_sent) == ("data parallel over 8 devices", 0)


@pytest.mark.parametrize("device", ["h100:8", "cpu:8"])
@pytest.mark.parametrize("op", [jnp.sort, jnp.cumsum, lambda x: jax.lax.top_k(x, 4), lambda x: jnp.fft.fft(x).real])
def test_the_only_argument_is_no_small_array(op, device):
    kind = shardfn.plan(op, shaped(4096), in_strategy=((8,),), device=device).kind
    assert kind == "rows sharded 8 ways"


def test_rows_and_columns_are_those_of_matrices():
    made = shardfn.plan(lambda x: 2 * x, shaped(16, 16, 16), in_strategy=((1, 4, 2),), device="h100:8")
    assert made.kind == "dimension 1 sharded 4 ways × dimension 2 sharded 2 ways"


def test_members_of_an_ensemble_are_no_experts():
    def train_step(params, x, y):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"up": shaped(8, 32, 64), "down": shaped(8, 64, 32)}
    made = shardfn.plan(jax.vmap(train_step, (0, None, None)), params, shaped(16, 32), shaped(16, 32),
                        in_strategy=((8, 1, 1), REPLICATED, REPLICATED), device="cpu:8")  # fmt: skip
    assert made.kind == "ensemble parallel over 8 devices"
