"""A pipeline's loss and gradients are the plain ones; what it sends and keeps is what its schedule says."""

import functools
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardfn import train
from shardfn.errors import NotAvailableError, StrategyError, StrategyTypeError
from shardfn.mindspore import Cell, auto_parallel
from shardfn.train.pipelines.flat_parameters import PackedParameters
from tests.marks import some_slow

VOCAB, D = 16, 8
KEYS = jax.random.split(jax.random.key(0), 12)
TOKENS = jax.random.randint(KEYS[0], (48,), 0, VOCAB)
NEXT = (TOKENS * 3 + 1) % VOCAB
X, Y = jax.random.normal(KEYS[1], (16, D)), jax.random.normal(KEYS[2], (16, 4))
WS = [jax.random.normal(KEYS[3], (D, 16)), jax.random.normal(KEYS[4], (16, 6)), jax.random.normal(KEYS[5], (6, 4))]
LAYERS = [lambda w, x: jnp.tanh(x @ w), lambda w, x: jax.nn.relu(x @ w), lambda w, x, y: jnp.mean((x @ w - y) ** 2)]
TWO = jax.devices()[:2]


def chained(ws, x, y):
    return LAYERS[2](ws[2], LAYERS[1](ws[1], LAYERS[0](ws[0], x)), y)


def language(params, tokens, wanted):
    """An embedding tied to the head, layers, and a term of the weights: all that makes stages unlike."""
    x = params["embed"][tokens] + params["position"]
    for block in params["blocks"]:
        x = x + jnp.tanh(x @ block["up"]) @ block["down"]
    loss = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, wanted).mean()
    return loss + 1e-3 * sum(jnp.sum(block["up"] ** 2) for block in params["blocks"])


language_and_gradient = jax.jit(jax.value_and_grad(language))
chained_and_gradient = jax.jit(jax.value_and_grad(chained))


def language_params(layers=5):
    block = lambda k: {"up": jax.random.normal(k, (D, 2 * D)) / 3, "down": jax.random.normal(k, (2 * D, D)) / 4}  # noqa: E731
    return {
        "embed": jax.random.normal(KEYS[6], (VOCAB, D)) / 2,
        "position": jnp.ones(D) / 7,
        "blocks": [block(k) for k in KEYS[7 : 7 + layers]],
    }


def close(got, wanted, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def collectives(text):
    found = []
    for line in text.splitlines():
        match = re.search(r"= (.*?) (all-[\w-]+?|collective-permute|reduce-scatter)(-start)?\(", line)
        if match:
            pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
            sizes = [
                np.prod([int(n) for n in s.split(",") if n] or [1]) for s in re.findall(r"\w\[([\d,]*)\]", match[1])
            ]
            found.append((match[2], max(sizes), re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if pairs else []))
    return found


ORDERS = [
    {"pipeline_stages": 4},
    {"pipeline_stages": 4, "schedule": "gpipe"},
    {"pipeline_stages": 2, "schedule": "interleaved"},
    {"pipeline_stages": 1, "interleave": 3},
]


@pytest.mark.parametrize("how", some_slow(ORDERS, [ORDERS[0], ORDERS[3]]), ids=str)
def test_loss_and_gradients(how):
    """Tied embedding and head on the end stages, five layers over four stages; data parallel besides."""
    params = language_params()
    pipe = train.pipeline(language, 6, auto_pipeline=True, **how)
    packed = pipe.pack(params, TOKENS, NEXT)
    wanted = language_and_gradient(params, TOKENS, NEXT)
    value, grads = jax.jit(jax.value_and_grad(pipe))(packed, TOKENS, NEXT)
    close((value, pipe.unpack(grads)), wanted)
    close(pipe.unpack(packed), params, 0)
    if how == ORDERS[0]:
        close(pipe(packed, TOKENS, NEXT), wanted[0])  # without gradients
        close(jax.value_and_grad(pipe)(params, TOKENS, NEXT), wanted)  # from parameters as they are
        assert packed.layout.of_stage(-1) == [10], "the embedding, which two stages read"
        held = packed.buffers["float32"].addressable_shards[0].data.nbytes
        assert held == packed.buffers["float32"].nbytes / 4


@pytest.mark.slow
def test_one_grid_for_stages_data_tensor_and_optimizer():
    """Two stages x two parts of the batch x two ways within a layer, states cut over what is left."""
    params = language_params(4)
    optimizer = optax.adamw(1e-2)
    plan = {"blocks/*/up": (1, 2), "blocks/*/down": (2, 1)}
    pipe = train.pipeline(language, 6, auto_pipeline=True, pipeline_stages=2, parameter_plan=plan)
    config = {"optimizer_level": "level2", "parallel_optimizer_threshold": 0}
    step = train.step(pipe, optimizer, mode="semi_auto_parallel", parallel_optimizer_config=config)
    state = step.init(pipe.pack(params, TOKENS, NEXT), TOKENS, NEXT)
    buffer, moment = state.params.buffers["float32_sharded"], state.opt_state[0].mu.buffers["float32_sharded"]
    assert dict(buffer.sharding.mesh.shape) == {"stage": 2, "data": 2, "tensor": 2}
    assert buffer.addressable_shards[0].data.size == buffer.size / 4
    assert moment.addressable_shards[0].data.size == moment.size / 8

    plain, opt_state, wanted, got = params, optimizer.init(params), [], []
    for _ in range(3):
        state, value = step(state, TOKENS, NEXT)
        got.append(float(value))
        value, grads = language_and_gradient(plain, TOKENS, NEXT)
        updates, opt_state = jax.jit(optimizer.update)(grads, opt_state, plain)
        plain = optax.apply_updates(plain, updates)
        wanted.append(float(value))
    close(got, wanted)
    close(pipe.unpack(state.params), plain, 1e-4)


@pytest.mark.slow
def test_only_neighbours_send_and_nothing_is_gathered():
    plan = {"blocks/*/up": (1, 2), "blocks/*/down": (2, 1)}
    pipe = train.pipeline(language, 4, stage_config={f"blocks/{i}": i for i in range(4)}, parameter_plan=plan)
    params = language_params(4)
    packed = pipe.pack(params, TOKENS, NEXT)
    text = jax.jit(jax.value_and_grad(pipe)).lower(packed, TOKENS, NEXT).compile().as_text()
    found = collectives(text)
    assert {kind for kind, _, _ in found} == {"collective-permute", "all-reduce"}
    pairs = {(int(a) // 2, int(b) // 2) for kind, _, pairs in found for a, b in pairs if kind == "collective-permute"}
    assert pairs == {(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)}
    per_tick = [size for kind, size, _ in found if kind == "collective-permute"]
    assert max(per_tick) <= 12 * D, "the rows of one micro-batch"


def test_memory_of_1f1b_does_not_grow_with_micro_size():
    w = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    layers = [LAYERS[0], LAYERS[2]]

    @functools.cache
    def temporary(order, micro):
        x = jax.ShapeDtypeStruct((32 * micro, 64), jnp.float32)
        pipe = train.pipeline(layers, micro, schedule=order, device=TWO)
        compiled = jax.jit(jax.value_and_grad(pipe)).lower(pipe.pack(w, x, x), x, x).compile()
        assert pipe.describe(w, x, x).kept_bytes == pipe.schedule.slots * 32 * 64 * 4
        return compiled.memory_analysis().temp_size_in_bytes

    message = 32 * 64 * 4
    assert temporary("1f1b", 24) - temporary("1f1b", 8) < message
    assert temporary("gpipe", 24) - temporary("gpipe", 8) >= 16 * message
    assert temporary("1f1b", 24) < temporary("gpipe", 24)


# ---- the ways to say what belongs to which stage


def test_list_of_functions():
    """Borders of two shapes, two dtypes."""
    layers = [
        LAYERS[0],
        lambda w, x: jax.nn.relu(x @ w).astype(jnp.bfloat16),
        lambda w, x, y: LAYERS[2](w, x.astype(jnp.float32), y),
    ]
    plain = lambda ws, x, y: layers[2](ws[2], layers[1](ws[1], layers[0](ws[0], x)), y)  # noqa: E731
    pipe = train.pipeline(layers, 4, device=jax.devices()[:3])
    close(jax.value_and_grad(pipe)(WS, X, Y), jax.jit(jax.value_and_grad(plain))(WS, X, Y), 2e-2)
    assert [row.parameters for row in pipe.describe(WS, X, Y).stages] == [128, 96, 24]


def test_staged():
    def loss(ws, x, y):
        x = train.staged(lambda w, x: LAYERS[1](w, x), 0)(ws[1], LAYERS[0](ws[0], x))
        return train.staged(LAYERS[2], 1)(ws[2], x, y)

    pipe = train.pipeline(loss, 2, pipeline_stages=2, device=TWO)
    close(jax.value_and_grad(pipe)(WS, X, Y), chained_and_gradient(WS, X, Y))


def test_stage_config_and_segments():
    ws = [*WS[:1], *(jax.random.normal(k, (16, 16)) / 4 for k in KEYS[:2]), jnp.ones((16, 4)) / 9]

    def deep(ws, x, y):
        for w in ws[:-1]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ ws[-1] - y) ** 2)

    pipe = train.pipeline(
        deep, 4, stage_config={"0": 0, "1": 1, "2": 0, "3": 1}, segment_config={"[23]": 1}, device=TWO
    )
    close(jax.value_and_grad(pipe)(ws, X, Y), jax.jit(jax.value_and_grad(deep))(ws, X, Y))
    assert (pipe.schedule.devices, pipe.schedule.chunks) == (2, 2)


class Block(eqx.Module):
    w: jax.Array
    act: object
    pipeline_stage: int = eqx.field(static=True)

    def __call__(self, x):
        return self.act(x @ self.w)


class Net(eqx.Module):
    blocks: list

    def __call__(self, x, y):
        for block in self.blocks:
            x = block(x)
        return jnp.mean((x - y) ** 2)


@pytest.mark.slow
def test_an_equinox_module_with_marks_trains():
    net = Net([Block(WS[0], jnp.tanh, 0), Block(WS[1], jax.nn.relu, 0), Block(WS[2], lambda x: x, 1)])
    pipe = train.pipeline(net, 2, device=TWO)
    packed = pipe.pack(net, X, Y)
    step = train.step(pipe, optax.sgd(0.1), device=TWO)
    state, value = step(step.init(packed, X, Y), X, Y)
    close(value, net(X, Y))
    made = pipe.unpack(state.params)
    grads = eqx.filter_grad(lambda net: net(X, Y))(net)
    close(made.blocks[2].w, net.blocks[2].w - 0.1 * grads.blocks[2].w)
    assert made.blocks[1].act is jax.nn.relu


class Half(nnx.Module):
    def __init__(self, size_in, size_out, stage, rngs):
        self.dense = nnx.Linear(size_in, size_out, rngs=rngs)
        self.pipeline_stage = stage

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class Both(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = Half(D, 16, 0, rngs), Half(16, 4, 1, rngs)

    def __call__(self, x, y):
        return jnp.mean((self.last(self.first(x)) - y) ** 2)


def test_an_nnx_module_with_marks():
    net = Both(nnx.Rngs(0))
    pipe = train.pipeline(lambda net, x, y: net(x, y), 2, device=TWO)
    close(pipe(net, X, Y), net(X, Y))
    assert [row.parameters for row in pipe.describe(net, X, Y).stages] == [16 * D + 16, 16 * 4 + 4]


class Dense(Cell):
    def __init__(self, w):
        self.w = w

    def construct(self, x):
        return jnp.tanh(x @ self.w)


class Cells(Cell):
    def __init__(self):
        self.one, self.two = Dense(WS[0]), Dense(jnp.ones((16, 4)) / 5)
        self.one.pipeline_stage, self.two.pipeline_stage = 0, 1

    def construct(self, x, y):
        return jnp.mean((self.two(self.one(x)) - y) ** 2)


@pytest.mark.parametrize("inside", [False, True])
def test_a_function_of_a_cell_with_marks(inside):
    net = Cells()
    model = {"net": net} if inside else net
    pipe = train.pipeline(lambda m, x, y: (m["net"] if inside else m)(x, y), 2, device=TWO)
    close(pipe(model, X, Y), net(X, Y))
    assert [row.parameters for row in pipe.describe(model, X, Y).stages] == [WS[0].size, 64]


def test_a_cell_with_marks():
    net = Cells()
    pipe = train.pipeline(net, 2, device=TWO, loss="sum")
    params = net.parameters_dict()
    close(pipe(params, X, Y), 2 * net(X, Y))
    described = pipe.describe(params, X, Y)
    assert [row.parameters for row in described.stages] == [16 * D, 16 * 4]
    assert pipe.describe(X, Y) == described == train.pipeline(net, 2, device=TWO, loss="sum").describe(X, Y)


# ---- the rest


@pytest.mark.slow
def test_ops_of_all_kinds():
    """Ints that go over a border, a loop, a branch on a leaf that is no parameter, recomputation."""
    params = {
        "route": jax.random.normal(KEYS[0], (D, 4)),
        "deep": jax.random.normal(KEYS[1], (3, D, D)) / 3,
        "expert": jax.random.normal(KEYS[2], (4, D, 4)) / 3,
        "count": jnp.int32(2),
    }

    def loss(params, x, y):
        chosen = jnp.argmax(x @ params["route"], -1)
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["deep"])
        x = jax.checkpoint(lambda w, x: jnp.sin(x @ w))(params["deep"][0], x)
        x = train.staged(lambda x, e, i: jnp.einsum("bd,bde->be", x, e[i]), 1)(x, params["expert"], chosen)
        return jnp.mean((jax.lax.cond(params["count"] > 1, lambda x: 2 * x, lambda x: x, x) - y) ** 2)

    pipe = train.pipeline(loss, 2, pipeline_stages=2, device=TWO)
    value, grads = jax.value_and_grad(pipe, allow_int=True)(params, X, Y)
    wanted, plain = jax.jit(jax.value_and_grad(loss, allow_int=True))(params, X, Y)
    assert grads.pop("count").dtype == plain.pop("count").dtype == jax.dtypes.float0
    close((value, grads), (wanted, plain))


def test_shapes_are_enough_and_other_batches_fit():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), language_params(2))
    tokens = jax.ShapeDtypeStruct((16,), jnp.int32)
    pipe = train.pipeline(language, 2, auto_pipeline=True, pipeline_stages=2, device=TWO)
    packed = pipe.pack(shapes, tokens, tokens)
    assert isinstance(packed, PackedParameters)
    assert packed.buffers["float32"].sharding.shard_shape(packed.buffers["float32"].shape)[0] == 1
    real = pipe.pack(language_params(2), tokens, tokens)
    close(pipe(real, TOKENS, NEXT), jax.jit(language)(language_params(2), TOKENS, NEXT))


def test_the_context_says_stages_and_order():
    with auto_parallel(pipeline_stages=4, pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "gpipe"}):
        pipe = train.pipeline(language, 8, auto_pipeline=True)
    assert (pipe.schedule.name, pipe.schedule.devices, pipe.schedule.chunks) == ("gpipe", 4, 2)
    with auto_parallel(pipeline_stages=2, auto_pipeline=True):
        pipe = train.pipeline(language, 8)
    assert (pipe.schedule.name, pipe.schedule.devices, pipe.options.auto) == ("1f1b", 2, True)
    with (
        pytest.raises(NotAvailableError),
        auto_parallel(pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}),
    ):
        pass


def test_gradients_of_the_batch_are_refused():
    pipe = train.pipeline([LAYERS[0], LAYERS[2]], 2, device=TWO)
    ws = [WS[0], jnp.ones((16, 4))]
    with pytest.raises(StrategyError, match="no gradients of the batch"):
        jax.grad(pipe, argnums=1)(ws, X, Y)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("how", some_slow(ORDERS[:3], ORDERS[:1]), ids=str)
def test_fewer_micro_batches_than_stages_run_and_warn(how, micro):
    params = language_params()
    pipe = train.pipeline(language, micro, auto_pipeline=True, **how)
    if micro < how["pipeline_stages"]:
        with pytest.warns(
            UserWarning, match=f"micro_size={micro} at most {micro} of {how['pipeline_stages']} stages work"
        ):
            packed = pipe.pack(params, TOKENS, NEXT)
    else:
        packed = pipe.pack(params, TOKENS, NEXT)
    value, grads = jax.jit(jax.value_and_grad(pipe))(packed, TOKENS, NEXT)
    close((value, pipe.unpack(grads)), language_and_gradient(params, TOKENS, NEXT))


def predicted(params, tokens):
    x = params["embed"][tokens] + params["position"]
    for block in params["blocks"]:
        x = x + jnp.tanh(x @ block["up"]) @ block["down"]
    return {"logits": x @ params["embed"].T, "tokens": tokens, "positive": (x > 0).any(-1)}


@pytest.mark.parametrize("how", some_slow(ORDERS, [ORDERS[0], ORDERS[3]]), ids=str)
def test_outputs_without_a_loss(how):
    """Outputs of several dtypes, from the last stage, with the examples in their order."""
    params = language_params()
    pipe = train.pipeline(predicted, 6, auto_pipeline=True, loss=None, **how)
    packed = pipe.pack(params, TOKENS)
    found = jax.jit(pipe)(packed, TOKENS)
    close(found, predicted(params, TOKENS))
    assert found["logits"].sharding.shard_shape((48, VOCAB)) == (48 // (8 // how["pipeline_stages"]), VOCAB)
    close(pipe(params, TOKENS), found)
    assert {tick.kind for tick in pipe.schedule.ticks} == {"forward"}
    assert pipe.describe(params, TOKENS).schedule == pipe.schedule


def test_outputs_of_a_list_of_layers_with_tensor_parallel_stages():
    layers = [lambda w, x: jax.nn.relu(x @ w["up"]) @ w["down"]] * 4
    ws = [{"up": jax.random.normal(k, (D, 16)), "down": jax.random.normal(k, (16, D))} for k in KEYS[:4]]
    plan = {"*/up": (1, 2), "*/down": (2, 1)}
    pipe = train.pipeline(layers, 4, pipeline_stages=2, loss=None, parameter_plan=plan)
    wanted = functools.reduce(lambda x, w: layers[0](w, x), ws, X)
    close(pipe(pipe.pack(ws, X), X), wanted, 1e-3)


def test_outputs_have_no_gradients_and_are_no_loss():
    pipe = train.pipeline(predicted, 2, auto_pipeline=True, loss=None, pipeline_stages=2)
    params = language_params(2)
    with pytest.raises(StrategyError, match="a pipeline of outputs has no gradients"):
        jax.grad(lambda p: pipe(p, TOKENS)["logits"].sum())(params)
    with pytest.raises(StrategyError, match="the pipeline returns outputs, not a loss"):
        train.step(pipe, optax.sgd(0.1))
    scalar = train.pipeline(
        lambda p, x: predicted(p, x)["logits"].mean(), 2, auto_pipeline=True, loss=None, pipeline_stages=2
    )
    with pytest.raises(StrategyError, match="must have the batch in dimension 0"):
        scalar(params, TOKENS)


MADE = [  # arguments of pipeline, parts of the message
    (dict(micro_size=0), ["`micro_size` cannot be 0", "int from 1 up"]),
    (dict(micro_size=4, schedule="1f2b"), ["no schedule '1f2b'", "1f1b, gpipe, interleaved"]),
    (dict(micro_size=4, loss="median"), ["`loss` cannot be 'median'"]),
    (dict(micro_size=4, stages=[LAYERS[0]], pipeline_stages=2), ["1 functions do not fill 2 stages"]),
    (dict(micro_size=4, stage_config={"w": -1}), ["int from 0 up"]),
]
MADE_OF_TYPE = [
    (dict(micro_size=True), ["`micro_size` cannot be True", "int from 1 up"]),
    (dict(micro_size=4, stages=3), ["`stages` is an int, no function"]),
    (dict(micro_size=4, pipeline_stages="2"), ["`pipeline_stages` cannot be '2'"]),
]


@pytest.mark.parametrize(("how", "parts"), [*MADE, *MADE_OF_TYPE], ids=lambda v: v[0] if isinstance(v, list) else "")
def test_errors_of_arguments(how, parts):
    kind = StrategyTypeError if (how, parts) in MADE_OF_TYPE else StrategyError
    with pytest.raises(kind) as caught:
        train.pipeline(**{"stages": chained, **how})
    assert all(part in str(caught.value) for part in parts), str(caught.value)


CALLED = [
    (dict(), ["the number of stages is unknown"]),
    (dict(pipeline_stages=2), ["nothing assigns the model to 2 stages", "auto_pipeline=True"]),
    (dict(pipeline_stages=3, auto_pipeline=True), ["2 devices cannot be shared by 3 stages"]),
    (dict(stage_config={"0": 0, "7": 1}), ["stage_config '7' matches no parameter", "the parameters are 0, 1, 2"]),
    (dict(stage_config={"0": 1, "1": 0}), ["the stage mark of `1` goes backwards"]),
    (dict(stage_config={"0": 5}, pipeline_stages=2), ["`0` is marked for stage 5"]),
    (
        dict(pipeline_stages=2, auto_pipeline=True, micro_size=5),
        ["cannot be split into 5 micro-batches", "a batch of 15", "micro_size=4"],
    ),
    (dict(pipeline_stages=1, auto_pipeline=True, parameter_plan={"2": (1, 2, 1)}), ["has 2 dims, its entry 3"]),
    (
        dict(pipeline_stages=1, auto_pipeline=True, parameter_plan={"2": (4, 1)}),
        ["cannot be sharded 4 ways along dimension 0"],
    ),
    (dict(pipeline_stages=1, auto_pipeline=True, parameter_plan={"2": (2, 2)}), ["share one mesh axis"]),
    (dict(pipeline_stages=1, auto_pipeline=True, parameter_plan={"9": (2, 1)}), ["'9' matches no parameter"]),
]


@pytest.mark.parametrize(("how", "parts"), CALLED, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_errors_of_calls(how, parts):
    pipe = train.pipeline(chained, **{"micro_size": 8, "device": TWO, **how})
    with pytest.raises(StrategyError) as caught:
        pipe(WS, X, Y)
    assert all(part in str(caught.value) for part in [*parts, "fix:"]), str(caught.value)


STEPPED = [  # arguments of train.step around a pipeline, parts of the message
    (dict(has_aux=True), ["`has_aux` has no meaning around a pipeline", "leave has_aux out"]),
    (dict(recompute=2), ["`recompute` has no meaning around a pipeline"]),
    (dict(parameter_plan={"0": (2, 1)}), ["`parameter_plan` has no meaning", "give it to train.pipeline"]),
    (dict(in_strategy=((2, 1), (2, 1))), ["`in_strategy` has no meaning"]),
    (dict(layerwise_parallel=["0"]), ["`layerwise_parallel` has no meaning around a pipeline"]),
    (dict(layout="gpt2/fsdp-tp", memory_limit="1GiB"), ["`layout` has no", "`memory_limit` has no"]),
    (dict(loss_repeated_mean=False, reuse="auto"), ["`loss_repeated_mean` has no meaning", "`reuse` has no meaning"]),
    (dict(parallel_optimizer_comm_recompute=True, parallel_optimizer_config={"optimizer_level": "level3"}),
     ["`parallel_optimizer_comm_recompute` has no meaning around a pipeline"]),
]  # fmt: skip


@pytest.mark.parametrize(("how", "parts"), STEPPED, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_errors_of_a_step_around_it(how, parts):
    pipe = train.pipeline(LAYERS, 4, device=jax.devices()[:3])
    with pytest.raises(StrategyError) as caught:
        train.step(pipe, optax.sgd(0.1), **{"mode": "semi_auto_parallel", **how})
    assert all(part in str(caught.value) for part in [*parts, "fix:"]), str(caught.value)


def test_a_step_around_it():
    """Micro-batches of the step around those of the pipeline; other devices than the pipeline's are an error."""
    pipe = train.pipeline([LAYERS[0], LAYERS[2]], 2, device=TWO)
    ws = [WS[0], jnp.ones((16, 4)) / 9]
    packed = pipe.pack(ws, X, Y)
    step = train.step(pipe, optax.sgd(0.1), micro_batches=2)
    state, value = step(step.init(packed, X, Y), X, Y)
    wanted, grads = jax.jit(jax.value_and_grad(lambda ws: LAYERS[2](ws[1], LAYERS[0](ws[0], X), Y)))(ws)
    close(value, wanted)
    close(pipe.unpack(state.params), jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads))
    with pytest.raises(StrategyError, match="the step and its pipeline are for different devices"):
        train.step(pipe, optax.sgd(0.1), device=jax.devices()[:4]).init(packed, X, Y)


def test_an_auxiliary_output_is_refused():
    pipe = train.pipeline(lambda w, x, y: (jnp.mean((x @ w - y) ** 2), x), 2, pipeline_stages=2, auto_pipeline=True)
    with pytest.raises(StrategyError, match=r"the loss of a pipeline must be one floating-point number"):
        pipe(jnp.ones((D, 4)), X, Y)


def test_packed_before_the_stages_are_known():
    known = train.pipeline(LAYERS, 4, device=jax.devices()[:3])
    packed = known.pack(WS, X, Y)
    fresh = train.pipeline(LAYERS, 4, device=jax.devices()[:3])
    with pytest.raises(StrategyError, match=r"call pack\(params, \*batch\) first"):
        fresh(packed, X, Y)


def test_describe():
    pipe = train.pipeline(language, 8, auto_pipeline=True, pipeline_stages=4, interleave=1)
    params = language_params()
    found = pipe.describe(params, TOKENS[:16], NEXT[:16])
    assert found.to_dict()["schedule"] == {"name": "1f1b", "micro_size": 8, "bubble": pytest.approx(3 / 11)}
    assert sum(row.share for row in found.stages) == pytest.approx(1)
    assert found.over_best <= 1.021
    assert "bubble 27.3%" in str(found)


# ---- sums and means on any number of devices

ADDED = {
    "a sum": lambda ws, x, y: jnp.sum((jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2] - y) ** 2),
    "half a sum": lambda ws, x, y: 0.5 * jnp.sum(jnp.sum((jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2] - y) ** 2, 1)),
    "a dot": lambda ws, x, y: -jnp.vdot(jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2], y) / 3,
    "a mean": lambda ws, x, y: jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2] - y) ** 2),
    "a mean and a penalty": lambda ws, x, y: (
        jnp.sum((jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2] - y) ** 2) / x.shape[0] + 1e-2 * jnp.sum(ws[0] ** 2)
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_sum_is_the_plain_one_on_any_number_of_devices(name):
    loss = ADDED[name]
    value, grads = jax.value_and_grad(loss)(WS, X, Y)
    times = 2 if "mean" in name else 1  # MindSpore's PipelineCell adds the micro-batches of a mean
    for devices in (2, 8):
        pipe = train.pipeline(
            loss, 2, pipeline_stages=2, auto_pipeline=True, loss="sum", device=jax.devices()[:devices]
        )
        got = jax.jit(jax.value_and_grad(pipe))(WS, X, Y)
        close(got, jax.tree.map(lambda x: times * x, (value, grads)), 1e-4)


UNKNOWN = {
    "a weighted mean": lambda ws, x, y: jnp.sum((x @ ws[0]) ** 2) / jnp.sum(jnp.abs(y)),
    "a sum and a penalty": lambda ws, x, y: jnp.sum((x @ ws[0]) ** 2) + jnp.sum(ws[1] ** 2),
    "a largest": lambda ws, x, y: jnp.max(x @ ws[0]),
    "a mean of an earlier mean": lambda ws, x, y: jnp.sum((x @ ws[0]) ** 2 / x.shape[0]),
    "one size only": lambda ws, x, y: jnp.sum((x @ ws[0]).reshape(2, -1)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_sum_that_nothing_shows_is_refused_where_the_batch_is_sharded(name):
    pipe = train.pipeline(UNKNOWN[name], 2, pipeline_stages=2, auto_pipeline=True, loss="sum")
    with pytest.raises(StrategyError, match="nothing shows how the losses of 4 shards"):
        pipe(WS, X, Y)


@pytest.mark.parametrize("name", ["a weighted mean", "a sum and a penalty", "a largest", "a mean of an earlier mean"])
def test_a_sum_that_nothing_shows_warns_where_micro_batches_are_added(name):
    pipe = train.pipeline(UNKNOWN[name], 2, pipeline_stages=2, auto_pipeline=True, loss="sum", device=TWO)
    with pytest.warns(UserWarning, match="nothing shows that the loss is a sum over the batch"):
        pipe(WS, X, Y)


ACROSS = {
    "centred": lambda x: x - x.mean(0),
    "scaled": lambda x: x / jnp.max(x),
    "attention to examples": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "reversed": lambda x: x[::-1],
    "shifted": lambda x: jnp.roll(x, 1, 0),
    "ranked": lambda x: jnp.sort(x, 0),
    "summed up": lambda x: jnp.cumsum(x, 0),
    "the first": lambda x: x - x[0],
    "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c - c.mean(0), x),
}
WITHIN = {
    "layer norm": lambda x: x - x.mean(1, keepdims=True),
    "reversed": lambda x: x[:, ::-1],
    "attention": lambda x: jax.nn.softmax(x[:, :, None] * x[:, None]) @ jnp.ones(x.shape[1]),
    "shifted": lambda x: jnp.roll(x, 1, 1),
    "chosen": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    "rows": lambda x: jax.lax.map(jnp.cumsum, x),
    "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c - c.mean(1, keepdims=True), x),
}


@pytest.mark.parametrize("name", ACROSS)
def test_outputs_and_losses_of_an_op_across_the_batch(name):
    model = lambda ws, x: ACROSS[name](jnp.tanh(x @ ws[0])) @ ws[1]  # noqa: E731
    how = {"pipeline_stages": 2, "auto_pipeline": True, "device": TWO}
    with pytest.raises(StrategyError, match="an output of a pipeline depends on other examples of the batch"):
        train.pipeline(model, 2, loss=None, **how)(WS, X)
    loss = lambda ws, x, y: jnp.mean((model(ws, x) @ ws[2] - y) ** 2)  # noqa: E731
    with pytest.warns(UserWarning, match="is computed over the batch, of which the pipeline sees 2 parts one by one"):
        train.pipeline(loss, 2, **how).pack(WS, X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train.pipeline(model, 1, loss=None, **how | {"pipeline_stages": 1, "device": TWO[:1]})(WS, X)


@pytest.mark.parametrize("name", WITHIN)
def test_outputs_of_an_op_within_each_example(name):
    model = lambda ws, x: WITHIN[name](jnp.tanh(x @ ws[0])) @ ws[1]  # noqa: E731
    for micro in (2, len(X)):
        pipe = train.pipeline(model, micro, loss=None, pipeline_stages=2, auto_pipeline=True, device=TWO)
        close(pipe(WS, X), model(WS, X))


@pytest.mark.parametrize("name", ["a weighted mean", "a sum and a penalty", "a largest"])
def test_a_mean_that_nothing_shows_warns(name):
    def pipe(loss, micro):
        return train.pipeline(loss, micro, pipeline_stages=2, auto_pipeline=True, device=TWO)

    with pytest.warns(UserWarning, match="nothing shows that the loss is a mean over the batch"):
        pipe(UNKNOWN[name], 2)(WS, X, Y)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="nothing shows")
        pipe(ADDED["a mean and a penalty"], 2)(WS, X, Y)
        pipe(lambda ws, x, y: jnp.mean((x @ ws[0]).reshape(8, 16)), 2)(WS, X, Y)  # for one size only


def test_the_mean_of_a_sum_is_refused():
    pipe = train.pipeline(ADDED["a sum"], 2, pipeline_stages=2, auto_pipeline=True, device=TWO)
    with pytest.raises(StrategyError, match="the loss is a sum over the batch, and the pipeline takes a mean"):
        pipe(WS, X, Y)


# ---- Python state of the loss


class Scaled:
    k = 1.0

    def __init__(self):
        self.cfg = {"by": [1.0]}

    def __call__(self, ws, x, y):
        TRACES.append(self.k)
        return self.k * self.cfg["by"][0] * jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2] - y) ** 2)


TRACES: list[float] = []
WAYS = {
    "object": lambda loss: loss,
    "method": lambda loss: loss.__call__,
    "partial": functools.partial,
    "list": lambda loss: [lambda w, x: x + w, functools.partial(lambda o, ws, x, y: o(ws, x, y), loss)],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_sees_what_its_loss_reads(way):
    loss = Scaled()
    pipe = train.pipeline(WAYS[way](loss), 2, pipeline_stages=2, auto_pipeline=way != "list", device=TWO)
    ws = WS if way != "list" else [jnp.zeros(1), WS]
    first = float(pipe(ws, X, Y))
    TRACES.clear()
    assert float(pipe(ws, X, Y)) == first and not TRACES
    loss.k = 2.0
    close(pipe(ws, X, Y), 2 * first)
    loss.cfg["by"][0] = 3.0
    value, grads = jax.value_and_grad(pipe)(ws, X, Y)
    close(value, 6 * first)
    close(grads if way != "list" else grads[1], jax.grad(loss)(WS, X, Y))


@pytest.mark.parametrize("way", ["object", "method", "partial"])
@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel", "pipeline"])
def test_a_step_sees_what_its_loss_reads(mode, way):
    loss = Scaled()
    function, options = WAYS[way](loss), {"mode": mode}
    if mode == "pipeline":
        function, options = train.pipeline(function, 2, pipeline_stages=2, auto_pipeline=True, device=TWO), {}
    step = train.step(function, optax.sgd(0.0), donate=False, **options)
    state, first = step(step.init(WS, X, Y), X, Y)
    TRACES.clear()
    state, again = step(state, X, Y)
    assert again == first and not TRACES
    loss.k = 2.0
    state, value = step(state, X, Y)
    close(value, 2 * first)
    loss.cfg = {"by": [3.0]}
    close(step(state, X, Y)[1], 6 * first)
