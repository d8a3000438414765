"""Uneven tables: values and gradients equal the dense ones, without a collective in the forward pass."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec

import shardfn
from shardfn import ShardError, checkpoint, embedding, layoutfile, train
from shardfn.embedding import UnevenRows
from shardfn.embedding.lookup import even_split_sends

ROWS = {1: (64,), 2: (40, 24), 4: (10, 20, 30, 4), 8: (10, 20, 1, 4, 8, 9, 7, 5)}
COLLECTIVE = re.compile(r"(?:all|collective|reduce)-\w+")


def data(split, batch=8, width=16, seed=0):
    random = np.random.default_rng(seed)
    table = random.normal(size=(split.total, width)).astype(np.float32)
    fields = [
        random.integers(o, o + n, (batch, 8 // split.parts)) for o, n in zip(split.offsets, split.rows, strict=True)
    ]
    return table, np.concatenate(fields, 1).astype(np.int32)


@pytest.mark.parametrize(
    ("devices", "strategy", "grad_collectives"),
    [(1, (1, 1), set()), (2, (2, 1), set()), (4, (4, 1), set()), (8, (8, 1), set()), (8, (4, 2), set()),
     (8, (2, 4), set()), (8, (1, 8), set()), (8, (4, 1), set()), (8, ((4, 1), (2, 4)), {"all-reduce"})],
)  # fmt: skip
def test_lookup_equals_dense_and_sends_nothing(devices, strategy, grad_collectives):
    pair = strategy if isinstance(strategy[0], tuple) else (strategy, None)
    split = UnevenRows(ROWS[pair[0][0]])
    table, ids = data(split)
    packed, here = split.pack(table), jax.devices()[:devices]
    placed = embedding.placement(strategy, split, packed.shape, ids.shape, here)
    look = lambda t, i: embedding.lookup(t, i, strategy=strategy, rows=split, device=here)  # noqa: E731
    forward = jax.jit(look, in_shardings=placed.shardings).lower(packed, ids).compile()
    np.testing.assert_array_equal(forward(*jax.device_put((packed, ids), placed.shardings)), table[ids])
    assert not COLLECTIVE.findall(forward.as_text())

    loss = lambda t, i, of: (of(t, i) ** 3).sum()  # noqa: E731
    grad = jax.jit(jax.grad(lambda t, i: loss(t, i, look)), in_shardings=placed.shardings).lower(packed, ids).compile()
    got = grad(*jax.device_put((packed, ids), placed.shardings))
    want = jax.grad(lambda t: loss(t, ids, lambda t, i: t[i]))(jnp.asarray(table))
    np.testing.assert_allclose(split.unpack(np.asarray(got)), want, rtol=1e-5)
    assert {name.removesuffix("-start") for name in COLLECTIVE.findall(grad.as_text())} == grad_collectives
    assert got.sharding.is_equivalent_to(placed.shardings[0], 3)


def test_lookup_of_ids_outside_their_part_gives_zeros_or_an_error():
    split = UnevenRows((3, 5), offsets=(0, 0))
    table, ids = np.ones((8, 2), np.float32), np.array([[2, 4], [3, -1], [-5, 5]], np.int32)
    options = {"strategy": (2, 1), "rows": split, "device": jax.devices()[:2]}
    y = embedding.lookup(table, ids, **options)
    assert y[..., 0].tolist() == [[1, 1], [0, 0], [0, 0]]
    with pytest.raises(ShardError, match=r"4 ids are outside their part(.|\n)*ids\[1, 0\] = 3"):
        embedding.lookup(table, ids, check=True, **options)
    checked = checkify.checkify(jax.jit(lambda i: embedding.lookup(table, i, check=True, **options)))
    assert "4 ids are outside" in checked(ids)[0].get()
    assert checked(ids[:1])[0].get() is None
    wide = UnevenRows((200, 300))
    found = embedding.lookup(np.arange(500.0)[:, None], np.array([[100, 120]], np.uint8), **{**options, "rows": wide})
    assert found[..., 0].tolist() == [[100, 0]]


def test_lookup_reports_all_problems_together():
    with pytest.raises(ShardError) as caught:
        embedding.lookup(np.ones((63, 16)), np.ones((8, 6), int), strategy=(8, 3), rows=(10, 20, 30, 4))
    assert len(caught.value.problems) == 6
    for wrong in [(3, 0), (True, 2), (), (1.5,), "12", 3]:
        with pytest.raises(ShardError):
            UnevenRows(wrong)
    with pytest.raises(ShardError, match="integers"):
        embedding.lookup(np.ones((4, 2)), np.ones((2, 1)), strategy=(1, 1), rows=(4,))


@pytest.mark.parametrize("rows", ROWS.values())
def test_split_packs_and_unpacks(rows):
    split = UnevenRows(rows)
    table = np.arange(split.total * 2.0).reshape(split.total, 2)
    packed = split.pack(table)
    np.testing.assert_array_equal(split.unpack(packed), table)
    even = UnevenRows.even(split.total, 4)
    np.testing.assert_array_equal(split.relayout(packed, even), even.pack(table))
    np.testing.assert_array_equal(jax.jit(split.pack)(table), packed)
    assert np.count_nonzero(packed[..., 1] == 0) == split.padding


def test_train_step_keeps_gradient_and_moments_on_their_device(tmp_path):
    split = UnevenRows(ROWS[8])
    table, ids = data(split)
    placed = embedding.placement((8, 1), split, (8, 20, 16), ids.shape)

    def loss(params, ids, packed=True):
        rows = (
            embedding.lookup(params["items"], ids, strategy=placed.shardings[0], rows=split)
            if packed
            else params["items"][ids]
        )
        return ((rows @ params["w"]) ** 2).mean()

    params = {"items": table, "w": np.ones((16, 1), np.float32)}
    step = train.step(loss, optax.adam(1e-2), mode="semi_auto_parallel", device=placed.mesh, in_strategy=((1, 8),),
                      parameter_plan={"items": (8, 1, 1)})  # fmt: skip
    alone = train.step(lambda p, i: loss(p, i, False), optax.adam(1e-2), mode="stand_alone")
    state, dense = step.init({**params, "items": split.pack(table)}, ids), alone.init(params)
    for _ in range(3):
        state, value = step(state, ids)
        dense, want = alone(dense, ids)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    moment = state.opt_state[0].mu["items"]
    assert moment.sharding.shard_shape(moment.shape) == (1, 20, 16)

    # the checkpoint holds the real rows, and another split goes on with them
    real = embedding.unpack(state, {"items": split})
    assert real.opt_state[0].nu["items"].shape == table.shape
    np.testing.assert_allclose(real.params["items"], dense.params["items"], rtol=1e-5, atol=1e-6)
    checkpoint.save(tmp_path / "run", real)
    shapes = embedding.unpack(jax.eval_shape(lambda: state), {"items": split})
    read = checkpoint.restore(tmp_path / "run", jax.devices()[0], like=shapes)
    again = embedding.pack(read, {"items": UnevenRows.even(64, 4)})
    assert again.params["items"].shape == (4, 16, 16)
    np.testing.assert_array_equal(again.opt_state[0].mu["items"].reshape(64, 16), real.opt_state[0].mu["items"])
    with pytest.raises(ShardError, match="itemz"):
        embedding.pack(read, {"itemz": split})
    with pytest.raises(ShardError, match="no array at `items`"):
        embedding.pack(state, {"items": split})


def test_layout_file_says_the_rows(tmp_path):
    split = UnevenRows(ROWS[4])
    made = shardfn.plan(
        lambda t: t * 2, jax.ShapeDtypeStruct((4, 30, 16), "float32"), in_strategy=((4, 1, 2),), device="cpu:8"
    )
    file = tmp_path / "layout.toml"
    layoutfile.write_layout(embedding.with_splits(made, {"t": split}), file)
    assert "rows = [10, 20, 30, 4]" in file.read_text()
    assert embedding.splits_of(file) == {"t": split}
    found = layoutfile.layout_shardings(file, {"t": split.pack(jnp.ones((64, 16)))})
    assert found["t"].shard_shape((4, 30, 16)) == (1, 30, 8)
    with pytest.raises(ShardError, match="does not have the rows"):
        layoutfile.layout_shardings(file, {"t": jnp.ones((4, 32, 16))})
    file.write_text(file.read_text().replace("[10,", "[0,"))
    with pytest.raises(ShardError, match="ints from 1"):
        embedding.splits_of(file)
    with pytest.raises(ShardError, match="no rule"):
        embedding.with_splits(made, {"x": split})


def test_compare_gives_the_bytes_that_the_split_saves():
    found = embedding.compare(UnevenRows(ROWS[4]), 16, (8, 8), strategy=(4, 2), device="cpu:8")
    assert (found.uneven.sent, found.uneven.sent_in_training) == (0, 0)
    assert found.even.sent > 0 and found.even.memory < found.uneven.memory == 30 * 8 * 4
    assert found.uneven.padding == (4 * 30 - 64) * 16 * 4


def test_lookup_with_a_sharding_of_ones_own_mesh():
    mesh = jax.make_mesh((4, 2), ("model", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = UnevenRows(ROWS[4])
    table, ids = data(split)
    at = NamedSharding(mesh, PartitionSpec("model"))
    look = lambda t, i: embedding.lookup(t, i, strategy=at, rows=split)  # noqa: E731
    np.testing.assert_array_equal(look(table, ids), table[ids])
    told = [
        text
        for text in shardfn.plan(jax.grad(lambda t: look(t, ids).sum()), split.pack(table)).diagnostics
        if "lookup" in text
    ]
    assert len(told) == 1 and "[4, 30, 16]" in told[0] and split.memory_text(16) in told[0]
    assert "would hold 896 B less, and send about 3 KiB" in told[0], (
        "16 rows of the even split are gathered from each device"
    )


@pytest.mark.parametrize(
    ("strategy", "device", "ids"),
    [((4, 2), "cpu:8", (8, 8)), ((8, 1), "tpu-v5e:8", (4, 8)), (((4, 1), (2, 4)), "cpu:8", (256, 8)),
     (((4, 1), (2, 1, 4)), "tpu-v5e:8", (4, 2, 4))],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 1000])
def test_what_the_even_split_sends_is_what_its_plan_sends(strategy, device, ids, rows):
    parts = (strategy if isinstance(strategy[0], int) else strategy[0])[0]
    split = UnevenRows(tuple(rows * n for n in ROWS[parts]))
    placed = embedding.placement(strategy, split, (split.total, 16), ids, device)
    columns = math.prod(placed.mesh.shape[axis] for axis in placed.table[2])
    planned = embedding.compare(split, 16, ids, strategy=strategy, device=device)
    about = even_split_sends(split, placed, ids, 16 // columns * 4)
    assert about == (pytest.approx(planned.even.sent, rel=0.05) if rows == 1 else planned.even.sent)
    assert planned.uneven.sent == 0 and planned.uneven.time_s > 0 < planned.even.time_s


@pytest.mark.parametrize("wide", [2**32 + 1, -(2**32) + 1])
def test_id_beyond_int32_is_of_no_row(wide):
    table = np.arange(1.0, 15.0, dtype="float32").reshape(7, 2)
    found = embedding.lookup(table, np.array([[wide, 3]]), strategy=(2, 1), rows=(3, 4), device=jax.devices()[:2])
    np.testing.assert_array_equal(found, [[[0, 0], table[3]]])


def test_unusable_devices_tables_and_splits_are_named():
    split = UnevenRows(ROWS[4])
    table, ids = data(split)
    for options, text in [
        ({"device": "tpu-v5e:4"}, "not here"),
        ({"table": "items"}, "no numbers"),
        ({"rows": ROWS[4], "offsets": (2**40, 0, 0, 0)}, "do not fit int32"),
    ]:
        with pytest.raises(ShardError, match=text):
            embedding.lookup(**{"table": table, "ids": ids, "strategy": (4, 1), "rows": split, **options})
    with pytest.raises(ShardError, match="dict of `UnevenRows`"):
        embedding.pack({"items": table}, {"items": ROWS[4]})
    with pytest.raises(ShardError, match="`compare` takes a tuple"):
        embedding.compare(ROWS[4], 16, (8, 8), strategy=(4, 1))
    found = jax.jit(lambda tree: embedding.unpack(tree, {"items": split}))({"items": split.pack(table)})
    np.testing.assert_array_equal(found["items"], table)


@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_ids_below_zero_are_those_of_a_part_with_a_negative_offset(kind):
    split, table = UnevenRows((5, 5), offsets=(-5, 0)), np.arange(1.0, 11, dtype="float32")[:, None]
    look = functools.partial(embedding.lookup, table, strategy=(2, 1), rows=split, device=jax.devices()[:2])
    assert look(kind([[-5, 0], [-1, 4], [-6, 5]]))[..., 0].tolist() == [[1, 6], [5, 10], [0, 0]]


def test_ids_that_int32_does_not_hold_are_in_no_part():
    split, table = UnevenRows((5, 5), offsets=(-5, 0)), np.ones((10, 1), "float32")
    ids = np.array([[2**40, -(2**40)], [2**32 - 5, 2**32]])
    assert not embedding.lookup(table, ids, strategy=(2, 1), rows=split, device=jax.devices()[:2]).any()


@pytest.mark.parametrize(
    ("ids", "text"), [([[1, 2], [3]], "different lengths"), ("abc", "ids are integers"), (3, "the ids are one number")]
)
def test_ids_that_are_none_are_named(ids, text):
    with pytest.raises(ShardError, match=text):
        embedding.lookup(np.ones((64, 2)), ids, strategy=(4, 2), rows=ROWS[4])
