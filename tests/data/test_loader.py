"""Batches: order, layout, last batches, resuming, what is read for whom, the context, a plan; and what is refused."""

import json
import subprocess
import sys

import grain
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

import shardfn
from shardfn import data
from shardfn.errors import StrategyError, StrategyTypeError
from shardfn.mindspore import Layout, set_auto_parallel_context

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(22, 8, 16, 3)).astype("float32")
LABELS = np.arange(22)
SOURCE = {"image": IMAGES, "label": LABELS}
CUTS = {"image": (2, 2, 2, 1), "label": (2,)}


def labels(loader):
    return [np.asarray(batch["label"]).tolist() for batch in loader]


def flat(rows):
    return [label for row in rows for label in row]


def check(batch, mask=None):
    """The images are those of the labels."""
    rows = np.asarray(batch["label"])
    kept = slice(None) if mask is None else np.asarray(mask)
    np.testing.assert_array_equal(np.asarray(batch["image"])[kept], IMAGES[rows[kept]])


STRATEGIES = [
    ("full_batch", (8, 8, 16, 3)),
    ("data_parallel", (1, 8, 16, 3)),
    (CUTS, (4, 4, 8, 3)),
    (((1, 2, 4, 1), (8,)), (8, 4, 4, 3)),
    ((Layout((2, 4), ("a", "b"))("b", "a", "None", "None"), Layout((2, 4), ("a", "b"))("b")), (2, 4, 16, 3)),
]


@pytest.mark.parametrize(("strategy", "piece"), STRATEGIES, ids=str)
def test_batches_lie_as_asked_and_hold_the_records(strategy, piece):
    loader = data.load(SOURCE, strategy, batch_size=8)
    seen = list(loader)
    assert len(seen) == len(loader) == 2
    for batch in seen:
        assert isinstance(batch["image"], jax.Array) and batch["image"].shape == (8, 8, 16, 3)
        assert batch["image"].sharding.shard_shape((8, 8, 16, 3)) == piece
        assert batch["image"].sharding == loader.shardings["image"]
        check(batch)
    assert labels(loader) == [list(range(8)), list(range(8, 16))]


def test_an_epoch_holds_every_record_once_and_the_next_is_in_another_order():
    loader = data.load(SOURCE, CUTS, batch_size=2, shuffle=True, seed=5, epochs=3)
    order = flat(labels(loader))
    epochs = [order[i : i + 22] for i in (0, 22, 44)]
    assert all(sorted(epoch) == list(range(22)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert labels(loader) == labels(
        data.load(SOURCE, "data_parallel", batch_size=2, shuffle=True, seed=5, epochs=3, device=jax.devices()[:2])
    )
    assert flat(labels(data.load(SOURCE, CUTS, batch_size=2, shuffle=True, seed=6))) != epochs[0]
    for batch in loader:
        check(batch)


def test_last_batches():
    assert labels(data.load(SOURCE, CUTS, batch_size=8, epochs=2)) == [list(range(8)), list(range(8, 16))] * 2
    padded = data.load(SOURCE, CUTS, batch_size=8, last="pad", epochs=2)
    assert len(padded) == 6 and padded.batches_per_epoch == 3
    for i, (batch, mask) in enumerate(padded):
        check(batch, mask)
        full = i % 3 < 2
        assert np.asarray(mask).tolist() == [True] * 8 if full else [True] * 6 + [False] * 2
        assert not np.asarray(batch["image"])[~np.asarray(mask)].any()
        assert mask.sharding.is_equivalent_to(batch["label"].sharding, 1)
    with pytest.raises(StrategyError, match="22 records do not divide into batches of 8"):
        data.load(SOURCE, CUTS, batch_size=8, last="error")
    assert len(data.load(SOURCE, CUTS, batch_size=2, last="error")) == 11
    few = data.load(SOURCE, CUTS, batch_size=32, last="pad")
    assert [int(mask.sum()) for _, mask in few] == [22]


def test_padding_is_not_read():
    asked = []

    class Records(list):
        def __getitem__(self, i):
            asked.append(i)
            return super().__getitem__(i)

    loader = data.load(Records(LABELS), ((2,),), batch_size=16, last="pad")
    asked.clear()
    batches = iter(loader)
    list(batches)
    assert sorted(asked) == list(range(22))
    assert sum(read.bytes for read in batches.reads) == 6 * 4


def test_what_each_device_reads():
    loader = data.load(SOURCE, {"image": (1, 2, 4, 1), "label": (1,)}, batch_size=4)
    image, label = 4 * 8 * 16 * 3 * 4, 4 * 4
    assert loader.bytes_per_device() == {place: image // 8 + label for place in range(8)}
    batches = iter(loader)
    next(batches)
    reads = [read for read in batches.reads if read.path == "image"]
    assert len(reads) == 8 and {read.bytes for read in reads} == {image // 8}
    assert sorted(read.devices for read in reads) == [(place,) for place in range(8)]
    (whole,) = (read for read in batches.reads if read.path == "label")
    assert whole.devices == tuple(range(8)), "read once, for all devices"
    assert str(loader).splitlines()[:2] == ["22 records, 4 to a batch, 5 batches", str(loader).splitlines()[1]]
    assert "(1, 2, 4, 1)" in str(loader) and "768" in str(loader)


def test_resuming_gives_the_batches_that_would_have_come():
    made = {"batch_size": 4, "shuffle": True, "seed": 3, "epochs": 3}
    whole = labels(data.load(SOURCE, CUTS, **made))
    for after in (0, 1, 7, 15):
        batches = iter(data.load(SOURCE, CUTS, **made))
        for _ in range(after):
            next(batches)
        saved = json.loads(json.dumps(batches.get_state()))
        again = iter(data.load(SOURCE, "data_parallel", device=jax.devices()[:4], **made))
        again.set_state(saved)
        assert again.get_state() == saved
        assert labels(again) == whole[after:]
    next(batches := iter(data.load(SOURCE, CUTS, **made)))
    batches.set_state(saved)
    assert labels(batches) == whole[15:], "an iterator in use goes there too"


def test_a_place_is_kept_by_orbax(tmp_path):
    import orbax.checkpoint as ocp

    made = {"batch_size": 4, "shuffle": True, "seed": 3, "epochs": 2}
    whole = labels(data.load(SOURCE, CUTS, **made))
    batches = iter(data.load(SOURCE, CUTS, **made))
    next(batches)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(data=ocp.args.JsonSave(batches.get_state())))
    again = iter(data.load(SOURCE, CUTS, **made))
    with ocp.CheckpointManager(tmp_path) as manager:
        again.set_state(manager.restore(1, args=ocp.args.Composite(data=ocp.args.JsonRestore()))["data"])
    assert labels(again) == whole[1:]


def test_the_state_is_where_the_caller_stands_not_where_reading_ahead_is():
    batches = iter(data.load(SOURCE, CUTS, batch_size=2, prefetch=4))
    next(batches)
    assert batches.get_state()["next_index"] == 1
    assert labels(data.load(SOURCE, CUTS, batch_size=2, prefetch=0)) == labels(
        data.load(SOURCE, CUTS, batch_size=2, prefetch=4)
    )


def state(**changed):
    return iter(data.load(SOURCE, CUTS, batch_size=4, shuffle=True)).get_state() | changed


BAD_STATES = [
    (StrategyTypeError, "is a dict, but this is an int", 3),
    (StrategyTypeError, "not the state of a data iterator", {"next_index": "1"}),
    (StrategyTypeError, "not the state of a data iterator", {"next_index": True}),
    (StrategyError, "with seed = 7", state(seed=7)),
    (StrategyError, "3 problems", state(batch_size=8, records=5, last="pad")),
    (StrategyError, "this one shuffles otherwise", {k: v for k, v in state().items() if k != "order"}),
    (StrategyError, "is at batch 6, and there are 5", state(next_index=6)),
    (StrategyError, "is at batch -1", state(next_index=-1)),
]


@pytest.mark.parametrize(("kind", "match", "wrong"), BAD_STATES, ids=[row[1] for row in BAD_STATES])
def test_a_state_of_other_batches_is_refused(kind, match, wrong):
    batches = iter(data.load(SOURCE, CUTS, batch_size=4, shuffle=True))
    with pytest.raises(kind, match=match):
        batches.set_state(wrong)
    assert len(labels(batches)) == 5, "nothing has changed"


def test_the_context_is_the_default():
    with shardfn.mindspore.auto_parallel(full_batch=True):
        (batch,) = data.load(SOURCE, batch_size=16)
    assert batch["image"].sharding.is_fully_replicated
    set_auto_parallel_context(dataset_strategy=((2, 1, 4, 1), (2,)))
    (batch,) = data.load(SOURCE, batch_size=16)
    assert batch["image"].sharding.shard_shape(batch["image"].shape) == (8, 8, 4, 3)
    with pytest.raises(StrategyError, match=r"`context.dataset_strategy` has 2 entries for 1 input"):
        data.load(IMAGES, batch_size=16)


def test_a_sharded_step_takes_the_batches_as_they_lie():
    @shardfn.shard(in_strategy=(None, (2, 1, 4, 1), (2,)))
    def step(w, image, label):
        return jnp.sum(jnp.tanh(image.mean((1, 2)) @ w) * label[:, None])

    w = jnp.ones((3, 5))
    shapes = data.load(SOURCE, "full_batch", batch_size=8).shapes
    plan = step.plan(w, shapes["image"], shapes["label"])
    loader = data.load(SOURCE, plan=plan, batch_size=8)
    assert loader.shardings["image"].mesh == plan.mesh
    assert loader.shardings["image"].is_equivalent_to(
        NamedSharding(plan.mesh, plan.decision("image").partition_spec), 4
    )
    for batch in loader:
        np.testing.assert_allclose(step(w, **batch), step.fn(w, **batch), rtol=1e-4)
    pair = data.load((IMAGES, LABELS), plan=plan, arguments=("image", "label"), batch_size=8)
    assert pair.shardings == (loader.shardings["image"], loader.shardings["label"])
    with pytest.raises(StrategyError, match="plan was made for"):
        data.load(SOURCE, plan=plan, batch_size=4)


def test_forms_of_a_source():
    bare = next(iter(data.load(IMAGES, ((1, 8, 1, 1),), batch_size=2)))
    assert bare.sharding.shard_shape(bare.shape) == (2, 1, 16, 3)
    records = [{"y": i, "x": IMAGES[i]} for i in range(22)]
    first = next(iter(data.load(records, ((2,), (2, 4, 1, 1)), batch_size=2)))
    assert first["x"].sharding.shard_shape(first["x"].shape) == (1, 2, 16, 3), "entries go in the order of the keys"
    chain = grain.MapDataset.source(LABELS).map(lambda i: (i, IMAGES[i] * 2))
    label, image = next(iter(data.load(chain, (None, (1, 1, 8, 1)), batch_size=8)))
    np.testing.assert_array_equal(image, IMAGES[:8] * 2)
    assert label.tolist() == list(range(8))
    (several,) = data.load([[i, i / 2] for i in range(8)], ((8,),), batch_size=8)
    assert isinstance(several, list) and several[1].tolist() == [i / 2 for i in range(8)]
    (pair,) = data.load(jnp.arange(8.0), "data_parallel", batch_size=8)
    assert pair.tolist() == list(range(8))
    nested = next(iter(data.load({"b": (IMAGES, LABELS), "a": LABELS}, "data_parallel", batch_size=8)))
    assert nested["b"][0].shape == (8, 8, 16, 3) and nested["a"].tolist() == list(range(8))


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float64", "int64", "complex64", "bfloat16"])
def test_dtypes_arrive_as_jax_has_them(dtype):
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rows = (np.arange(16).reshape(8, 2) % 5).astype(dtype)
    (batch,) = data.load(rows, "data_parallel", batch_size=8)
    assert batch.dtype == jax.dtypes.canonicalize_dtype(dtype)
    np.testing.assert_array_equal(np.asarray(batch), rows.astype(batch.dtype))


class OneByOne:
    """An array that is read by slices and single rows only."""

    def __init__(self, rows):
        self.rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return self.rows[at]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "column",
    [lambda x: x, OneByOne, lambda x: [int(i) for i in x], lambda x: [{"id": i} for i in x]],
    ids=["array", "windows", "numbers", "records"],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_64_bit_integers_that_do_not_fit_are_refused(column, shuffle, prefetch):
    fits = np.array([-(2**31), 2**31 - 1, 0, 1])
    (batch,) = data.load({"key": column(fits)}, "full_batch", batch_size=4, shuffle=shuffle, prefetch=prefetch)
    found = batch["key"]["id"] if isinstance(batch["key"], dict) else batch["key"]
    assert found.dtype == "int32" and sorted(found.tolist()) == sorted(fits.tolist())
    for bad in (2**31, -(2**40)):
        loader = data.load(
            {"key": column(np.array([1, bad, 3, 4]))}, "full_batch", batch_size=4, shuffle=shuffle, prefetch=prefetch
        )
        with pytest.raises(StrategyError, match=r"(?s)input `key.* do not fit int32.*jax_enable_x64") as caught:
            list(loader)
        assert str(bad) in str(caught.value)


def test_64_bit_integers_fit_with_x64():
    with jax.enable_x64(True):
        (batch,) = data.load(np.full(8, 2**40), "full_batch", batch_size=8)
        assert batch.tolist() == [2**40] * 8
        assert data.read(np.full((8, 8), 2**40), (2, 4)).min() == 2**40
    with pytest.raises(StrategyError, match="`image` do not fit uint32"):
        data.read(np.full((8, 8), 2**32, "uint64"), (2, 4))


def test_no_end():
    loader = data.load(LABELS, "full_batch", batch_size=11, epochs=None)
    batches = iter(loader)
    assert [next(batches)[0].item() for _ in range(5)] == [0, 11, 0, 11, 0]
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    batches.set_state({**batches.get_state(), "next_index": 1001})
    assert next(batches)[0] == 11
    assert "no end" in str(loader)


BAD = [
    (StrategyTypeError, "`batch_size` cannot be 2.0", {"batch_size": 2.0}),
    (StrategyError, "`batch_size` cannot be 0", {"batch_size": 0}),
    (StrategyError, "a batch of 23 is more than the 22 records", {"batch_size": 23}),
    (StrategyError, "`last` cannot be 'keep'", {"last": "keep"}),
    (StrategyTypeError, "`shuffle` cannot be 3", {"shuffle": 3}),
    (StrategyError, "`seed` cannot be -1", {"seed": -1}),
    (StrategyError, "2 problems", {"epochs": 0, "prefetch": -1}),
    (StrategyError, "5 is not divisible by 2", {"batch_size": 5}),
]


@pytest.mark.parametrize(("kind", "match", "options"), BAD, ids=[row[1] for row in BAD])
def test_what_is_wrong_is_said(kind, match, options):
    with pytest.raises(kind, match=match) as caught:
        data.load(SOURCE, CUTS, **{"batch_size": 4, **options})
    assert "fix:" in str(caught.value)


def test_a_reader_that_fails_says_so_where_the_batch_is_asked_for():
    class Broken(list):
        def __getitem__(self, i):
            if i == 5:
                raise OSError("the disk is gone")
            return super().__getitem__(i)

    batches = iter(data.load(Broken(LABELS), "full_batch", batch_size=4))
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_the_extra_is_named_and_import_does_not_need_it():
    code = """
import sys
import shardfn, shardfn.halo
assert "shardfn.data" not in sys.modules
sys.modules["grain"] = None
from shardfn import data
import numpy as np
assert data.read(np.ones((4, 2)), (1, 1)).shape == (4, 2)
try:
    data.load(np.ones((4, 2)), "full_batch", batch_size=2)
except ImportError as error:
    assert isinstance(error, shardfn.ShardError) and 'pip install ".[data]"' in str(error), str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
