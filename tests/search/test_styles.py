"""A style is one word for a textbook plan: what it shards, what it does with entries, limits and files, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn
from shardfn import AUTO, ShardError, shard, train
from shardfn.search.generators import STYLES

S = jax.ShapeDtypeStruct


def mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down


SHAPES = S((16, 32), "float32"), S((32, 64), "float32"), S((64, 32), "float32")


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, s.shape) for key, s in zip(keys, SHAPES, strict=True)]


def planned(style, *args, **options):
    return shardfn.plan(mlp, *(args or SHAPES), style=style, **options)


@pytest.mark.parametrize("level", ["communication", "memory", "time"])
@pytest.mark.parametrize("style", [name for name in STYLES if name != "zero1"])
def test_style_makes_a_plan_of_its_kind_at_every_level(style, level):
    made = planned(style, level=level, device="tpu-v5e:8")
    assert all(part in made.kind for part in STYLES[style].kind)
    assert made.style == style


def test_style_with_one_plan_says_so():
    made = shardfn.plan(
        jnp.matmul, S((64, 63), "float32"), S((63, 65), "float32"), style="data_parallel", device="h100:8"
    )
    assert made.policy == "style 'data_parallel': the only plan at level 0: batch sharded 8 ways"


@pytest.mark.parametrize("style", ["fsdp", "tensor_parallel"])
def test_style_computes_what_the_function_does(style):
    args = arrays()
    np.testing.assert_allclose(shard(mlp, style=style)(*args), mlp(*args), rtol=1e-4, atol=1e-4)


def test_style_tensor_parallel_shards_a_hidden_dimension_and_sums_once():
    made = planned("tensor_parallel", device="tpu-v5e:8", in_strategy=((2, 1), AUTO, AUTO))
    assert [d.strategy for d in made.inputs] == [(2, 1), (1, 4), (4, 1)]
    assert [c.kind for c in made.collectives] == ["all-reduce"]


def test_style_keeps_entries_and_holds_the_ops_to_the_style():
    long = S((65536, 256), "float32"), S((256, 1024), "float32"), S((1024, 256), "float32")
    entries = (2, 1), (1, 4), (4, 1)
    searched = shardfn.plan(mlp, *long, in_strategy=entries, level="time", device="tpu-v5e:8")
    made = shardfn.plan(mlp, *long, in_strategy=entries, level="time", device="tpu-v5e:8", style="tensor_parallel")
    assert searched.kind == "FSDP over 4 × data parallel over 2"
    assert made.kind == "tensor parallel over 4 × data parallel over 2"
    assert [d.strategy for d in made.inputs] == [*entries]
    assert not any(c.kind == "all-gather" for c in made.collectives)


def test_style_says_where_entries_are_of_another_kind():
    made = planned("fsdp", device="tpu-v5e:8", in_strategy=((8, 1), (1, 1), (1, 1)))
    assert made.kind == "data parallel over 8 devices"
    assert "they make the plan `data parallel over 8 devices`, though style='fsdp' was asked" in str(made)


@pytest.mark.parametrize(
    ("style", "kind"),
    [
        ("data_parallel", "data parallel over 8 devices"),
        ("tensor_parallel", "tensor parallel over 2 × data parallel over 4"),
    ],
)
def test_style_takes_the_users_mesh(style, kind):
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    entries = {"x": jax.sharding.PartitionSpec("data", None)} if style == "tensor_parallel" else None
    made = planned(style, device=jax.make_mesh((4, 2), mesh.axis_names), parameter_plan=entries)
    assert made.kind == kind


def test_style_shards_heads_only_where_they_divide():
    def attend(x, wq, wo):
        q = (x @ wq).reshape(*x.shape[:2], 2, 16)
        return jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q)).sum() + ((x @ wq) @ wo).sum()

    args = S((8, 4, 32), "float32"), S((32, 32), "float32"), S((32, 32), "float32")
    made = shardfn.plan(attend, *args, style="tensor_parallel", level="memory", device="tpu-v5e:8")
    assert made.decision("wq").strategy != (1, 8)


def test_style_of_a_training_step_shards_its_state():
    def loss(params, x, y):
        return ((mlp(x, params["up"], params["down"]) - y) ** 2).mean()

    _, up, down = arrays()
    for style in ("zero1", "fsdp"):
        step = train.step(loss, optax.adamw(1e-3), style=style)
        state = step.init({"up": up, "down": down})
        assert STYLES[style].kind[0] in step.plan(state, arrays()[0], arrays()[0]).kind


def test_style_is_kept_in_a_layout_file(tmp_path):
    made = planned("fsdp", device="cpu:8")
    made.save(tmp_path / "fsdp.toml")
    assert 'style = "fsdp"' in (tmp_path / "fsdp.toml").read_text()
    assert shardfn.load_layout(tmp_path / "fsdp.toml") == made
    again = shardfn.plan(mlp, *SHAPES, layout=tmp_path / "fsdp.toml", device="cpu:8")
    assert (again.cost, again.constraints) == (made.cost, made.constraints)


def test_style_compiles_only_plans_of_the_style():
    made = planned("tensor_parallel", compile_candidates=4)
    assert "tensor parallel" in made.kind


def test_style_counts_with_the_memory_limit():
    least = planned("data_parallel", device="tpu-v5e:8", level="memory").cost.memory.peak
    assert planned("data_parallel", device="tpu-v5e:8", memory_limit=least).cost.memory.peak <= least
    with pytest.raises(ShardError, match="no plan found fits"):
        planned("data_parallel", device="tpu-v5e:8", memory_limit=least - 1024)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"style": "fspd"}, "did you mean 'fsdp'?"),
        ({"style": "FSDP"}, "did you mean 'fsdp'"),
        ({"style": "Tensor Parallel"}, "did you mean 'tensor_parallel'"),
        ({"style": "dp"}, "did you mean 'data_parallel'"),
        ({"style": 3}, "`style` is an int"),
        ({"style": "fsdp", "search_mode": "dynamic_programming"}, "leave one of the two out"),
    ],
)
def test_style_that_is_none_is_refused_at_once(options, says):
    with pytest.raises(ShardError) as caught:
        shard(mlp, **options)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("style", "args", "says"),
    [
        ("zero1", SHAPES, "the function has none"),
        ("fsdp", (S((6, 32), "float32"), *SHAPES[1:]), "dimension 0 of x has 6 elements"),
        ("tensor_parallel", (SHAPES[0], S((32, 63), "float32"), S((63, 31), "float32")), ""),
        (
            "tensor_parallel",
            (S((16, 31), "float32"), S((31, 63), "float32"), S((63, 31), "float32")),
            "divides dimensions",
        ),
    ],
)
def test_style_that_the_shapes_do_not_allow_says_why(style, args, says):
    if not says:
        assert "tensor parallel" in planned(style, *args, device="tpu-v5e:8").kind
        return
    with pytest.raises(ShardError) as caught:
        planned(style, *args, device="tpu-v5e:8")
    assert says in str(caught.value) and f"style = {style!r}" in str(caught.value)


def test_style_that_the_entries_do_not_allow_says_to_leave_entries_out():
    with pytest.raises(ShardError, match="leave entries out") as caught:
        planned("tensor_parallel", *SHAPES, in_strategy=((8, 1), None, None), device="tpu-v5e:8")
    assert "of the entries" in str(caught.value)


def biased(params, x):
    for layer in params:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x


def layers(n, count=2):
    return [{"w": S((n, n), "float32"), "b": S((n,), "float32")} for _ in range(count)]


@pytest.mark.parametrize("level", ["communication", "time"])
@pytest.mark.parametrize("n", [32, 512])
def test_fsdp_gathers_no_vectors_where_replicas_cost_less(n, level):
    made = shardfn.plan(biased, layers(n), S((256, n), "float32"), style="fsdp", level=level, device="cpu:8")
    assert {d.strategy for d in made.inputs if d.path.endswith("b")} == {(1,)}
    assert {d.strategy for d in made.inputs if d.path.endswith("w")} == {(8, 1)}
    entries = {"params/*/b": (8,)}
    held = shardfn.plan(
        biased, layers(n), S((256, n), "float32"), style="fsdp", level=level, device="cpu:8", parameter_plan=entries
    )
    assert made.kind == held.kind == "FSDP over 8 devices"
    assert made.cost.communication_s < held.cost.communication_s


@pytest.mark.parametrize("n", [32, 512])
def test_fsdp_of_a_training_step_keeps_all_of_its_vectors_whole_or_sharded(n):
    def loss(params, x, y):
        return ((biased(params, x) - y) ** 2).mean()

    x = S((256, n), "float32")
    for level, strategy in ("communication", (1,)), ("memory", (8,)):
        step = train.step(loss, optax.adam(1e-3), style="fsdp", level=level, device="cpu:8")
        state = jax.eval_shape(lambda: step.init(jax.tree.map(lambda a: jnp.zeros(a.shape), layers(n)), x, x))  # noqa: B023
        made = step.plan(state, x, x)
        assert {d.strategy for d in made.inputs if d.path.endswith("/b")} == {strategy}


def test_fsdp_of_small_parameters_alone_shards_them():
    args = S((256, 32), "float32"), [S((32, 32), "float32")] * 3
    made = shardfn.plan(lambda x, ws: x @ ws[0] @ ws[1] @ ws[2], *args, style="fsdp", device="cpu:8")
    assert made.kind == "FSDP over 8 devices"


@pytest.mark.parametrize("style", ["fsdp", "zero1"])
def test_style_of_a_tree_without_a_batch_shards_its_arrays(style):
    tree = layers(32)
    optimizer = optax.adam(1e-3)

    def update(params, gradients, state):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    made = shardfn.plan(update, tree, tree, jax.eval_shape(optimizer.init, tree), style=style, device="cpu:8")
    assert {d.strategy for d in made.inputs if d.path.startswith("state/0/mu")} == {(8,), (8, 1)}
    assert made.cost.bytes_sent == 0
    with pytest.raises(ShardError, match="the devices divide no dimension"):
        shardfn.plan(
            lambda t: jax.tree.map(jnp.exp, t), [S((), "float32"), S((7,), "float32")], style=style, device="cpu:8"
        )


def test_style_shards_no_batch_that_is_none():
    with pytest.raises(ShardError, match="no argument has one"):
        shardfn.plan(lambda w: w @ w, S((8, 8), "float32"), style="data_parallel", device="tpu-v5e:8")


def test_style_beside_entries_for_every_array_says_what_it_costs(tmp_path):
    big = S((512, 1024), "float32"), S((1024, 4096), "float32"), S((4096, 1024), "float32")
    entries = (2, 1), (1, 4), (4, 1)
    made = shardfn.plan(mlp, *big, in_strategy=entries, style="fsdp", device="h100:8")
    alone = shardfn.plan(mlp, *big, in_strategy=entries, device="h100:8")
    more = made.cost.bytes_sent / alone.cost.bytes_sent - 1
    says = f"every array has one, and style='fsdp' costs {more:.0%} more bytes sent"
    assert (
        says in made.entries
        and "than the entries alone (tensor parallel over 4 × data parallel over 2)" in made.entries
    )
    assert f"entries: {made.entries}" in str(made)
    assert not shardfn.plan(mlp, *big, in_strategy=entries, style="tensor_parallel", device="h100:8").entries

    alone.save(path := tmp_path / "layout.toml")
    assert "style='fsdp' costs" in shardfn.plan(mlp, *big, layout=path, style="fsdp", device="h100:8").entries
    made.save(path)  # the style is the file's own
    assert not shardfn.plan(mlp, *big, layout=path, device="h100:8").entries


def test_style_beside_an_entry_that_shards_no_batch_says_that_it_is_resharded():
    big = S((512, 1024), "float32"), S((1024, 4096), "float32"), S((4096, 1024), "float32")
    made = shardfn.plan(mlp, *big, in_strategy=((1, 8), AUTO, AUTO), style="fsdp", device="h100:8")
    assert made.entries == "`x` shards no batch, and 'fsdp' reshards it inside; leave it open (AUTO) to save that"
    opened = shardfn.plan(mlp, *big, style="fsdp", device="h100:8")
    assert not opened.entries and opened.cost.bytes_sent < made.cost.bytes_sent


def test_gradients_of_a_tree_are_no_batch():
    update = lambda params, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)  # noqa: E731
    with pytest.raises(ShardError, match="no argument has one"):
        shardfn.plan(update, layers(32), layers(32), style="data_parallel", device="cpu:8")


def test_another_dimension_than_0_is_the_batch_where_an_entry_says_so():
    def recurrent(w, x):
        return jax.lax.scan(lambda h, now: (jnp.tanh(now @ w + h),) * 2, jnp.zeros((64, 256)), x)

    call = {"style": "data_parallel", "device": "h100:8"}
    args = S((256, 256), "float32"), S((100, 64, 256), "float32")
    with pytest.raises(ShardError) as caught:
        shardfn.plan(recurrent, *args, **call)
    assert "if dimension 1 of x is the batch" in (fix := caught.value.problems[0].fix)
    assert "in_strategy=(AUTO, (1, 8, 1))" in fix
    made = shardfn.plan(recurrent, *args, in_strategy=(AUTO, (1, 8, 1)), **call)
    assert (made.kind, made.cost.bytes_sent) == ("data parallel over 8 devices", 0)
    by_time = shardfn.plan(recurrent, args[0], S((128, 64, 256), "float32"), **call)
    assert any("no other candidate of style 'data_parallel'" in text for text in by_time.diagnostics)
    with pytest.raises(ShardError) as caught:  # features are none
        planned("data_parallel", S((6, 32), "float32"), *SHAPES[1:], device="h100:8")
    assert "if dimension" not in str(caught.value)
