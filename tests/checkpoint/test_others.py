"""Checkpoints that Orbax's and Flax's own code wrote are restored, and theirs restores ours."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import checkpoints, train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

from shardfn import checkpoint
from shardfn.checkpoint import arrays
from shardfn.errors import CheckpointError
from shardfn.planning.layout_rules import LayoutFile
from tests.checkpoint.states import mesh, same, training


@pytest.fixture(scope="module")
def state():
    state = training() | {"empty": {}, "none": None}
    del (
        state["params"]["none"],
        state["opt"][0].mu["none"],
        state["opt"][0].nu["none"],
    )  # Orbax saves no array without elements
    return state


def by_handler(use_ocdbt, use_zarr3):
    def write(folder, state):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
        with ocp.Checkpointer(handler) as writer:
            writer.save(folder, state)

    return write


def standard(folder, state):
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder, state)


def manager(folder, state):
    with ocp.CheckpointManager(folder) as steps:
        items = {"model": ocp.args.StandardSave(state), "data": ocp.args.JsonSave({"epoch": 1})}
        steps.save(3, args=ocp.args.Composite(**items))


def version_one(folder, state):
    v1.save(folder, state)


def maxtext(folder, state):
    """The calls of MaxText 0.2.5: `create_orbax_checkpoint_manager` and `save_checkpoint` of its `common/checkpointing.py`."""
    context = v1.Context()
    context.array.saving.use_ocdbt = context.array.saving.use_zarr3 = True
    context.array.saving.ocdbt_target_data_file_size = context.array.saving.storage_options.chunk_byte_size = 2 << 30
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = 96 << 30
    policies = v1.training
    steps = v1.training.Checkpointer(
        folder,
        context=context,
        save_decision_policy=policies.save_decision_policies.FixedIntervalPolicy(interval=1),
        preservation_policy=policies.preservation_policies.LatestN(10),
    )
    steps.save_checkpointables_async(3, {"items": state}, force=True, custom_metadata={"scan_layers": True}).result()
    steps.close()


WRITERS = {
    **{f"ocdbt={a}, zarr3={b}": by_handler(a, b) for a in (True, False) for b in (True, False)},
    "standard": standard,
    "manager": manager,
    "v1": version_one,
    "MaxText's calls": maxtext,
    "flax": lambda folder, state: checkpoints.save_checkpoint(
        folder, state, 3, orbax_checkpointer=ocp.PyTreeCheckpointer()
    ),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_others_wrote(tmp_path, state, write):
    write(tmp_path / "run", state)
    back = checkpoint.restore(tmp_path / "run", like=state)
    same(back, state)
    assert back["params"]["w1"].sharding == state["params"]["w1"].sharding
    here = checkpoint.restore(tmp_path / "run", jax.devices()[:2])  # no structure: dicts and lists
    assert here["params"]["w1"].sharding.device_set == set(jax.devices()[:2])
    same(here["params"], state["params"])
    found = checkpoint.verify(tmp_path / "run")
    assert not found.has_checksums and "has no checksums" in str(found)


def test_stored_shardings_of_others(tmp_path):
    wide = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh(4, 2), P("a", "b")))
    standard(tmp_path / "run", {"wide": wide, "scalar": jnp.float32(2)})
    assert checkpoint.restore(tmp_path / "run")["wide"].sharding == wide.sharding
    assert checkpoint.merge(tmp_path / "run", tmp_path / "one", only="wide").arrays == 1


def test_a_train_state_of_flax(tmp_path):
    params = {"dense": {"kernel": jnp.arange(8.0).reshape(2, 4)}}
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    checkpoints.save_checkpoint(tmp_path, state.replace(step=7), 7, orbax_checkpointer=ocp.PyTreeCheckpointer())
    back = checkpoint.restore(tmp_path / "checkpoint_7", like=state)
    assert type(back) is train_state.TrainState and back.step == 7
    same(back.params, state.params)


class Net(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.first, self.norm, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])


@pytest.mark.parametrize("form", [lambda state: state, nnx.to_pure_dict], ids=["state", "pure dict"])
def test_nnx_state_in_both_forms(tmp_path, form):
    graph, state = nnx.split(Net(0))
    standard(tmp_path / "run", form(state))
    fresh = nnx.state(Net(1))
    for like in (fresh, nnx.to_pure_dict(fresh)):
        same(checkpoint.restore(tmp_path / "run", like=like), state)
    part = checkpoint.restore(tmp_path / "run", like=fresh, only="layers/*")
    same(part["layers"], state["layers"])
    same(part["first"], fresh["first"])
    merged = nnx.merge(graph, checkpoint.restore(tmp_path / "run", like=fresh))
    np.testing.assert_array_equal(merged.first.kernel[...], state["first"]["kernel"][...])


def test_a_text_is_left_out(tmp_path):
    by_handler(True, True)(tmp_path / "run", {"w": jnp.ones(3), "name": "net"})
    assert checkpoint.restore(tmp_path / "run", jax.devices()[0], only="w")["w"].shape == (3,)
    with pytest.raises(CheckpointError, match="`name` is a text"):
        checkpoint.restore(tmp_path / "run", jax.devices()[0])


def test_a_folder_of_another_form_says_what_to_pass(tmp_path):
    with flax.config.temp_flip_flag("use_orbax_checkpointing", False):
        checkpoints.save_checkpoint(tmp_path / "old", {"w": np.ones(3)}, 3)
    with pytest.raises(CheckpointError, match=r"flax\.training\.checkpoints\.restore_checkpoint"):
        checkpoint.restore(tmp_path / "old")
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt")
    with ocp.CheckpointManager(tmp_path / "named", options=options) as steps:
        steps.save(3, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    with pytest.raises(CheckpointError, match=r"pass the folder of one of its steps: .*ckpt_3"):
        checkpoint.restore(tmp_path / "named")
    assert checkpoint.restore(tmp_path / "named" / "ckpt_3", jax.devices()[0])["w"].shape == (3,)


@pytest.mark.parametrize(
    ("name", "told"), [("net.ckpt", "load_distributed_checkpoint"), ("x.safetensors", "import_safetensors")]
)
def test_files_of_other_forms_say_what_reads_them(tmp_path, name, told):
    (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=told):
            checkpoint.restore(path)


def test_an_object_store_is_refused():
    with pytest.raises(CheckpointError, match=r"gs://bucket/run is no folder of a file system"):
        checkpoint.restore("gs://bucket/run")


def test_others_restore_ours(tmp_path, state):
    checkpoint.save(tmp_path, state, step=3)
    shapes = jax.tree.map(lambda x: x if not isinstance(x, jax.Array) else ocp.utils.to_shape_dtype_struct(x), state)
    with ocp.CheckpointManager(tmp_path) as steps:
        same(steps.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))["state"], state)
    params = {"params": shapes["params"]}
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with v1.training.Checkpointer(tmp_path, context=context) as steps:  # as MaxText opens its own
        same(steps.load_checkpointables(3, {"state": params})["state"], {"params": state["params"]})
    flat = checkpoints.restore_checkpoint(tmp_path / "3" / "state", None, orbax_checkpointer=ocp.PyTreeCheckpointer())
    same(flat["params"], state["params"])


def test_nodes_without_arrays_are_kept_by_copies_and_by_a_restore_without_like(tmp_path):
    held = {
        "p": jnp.ones(4),
        "o": optax.adamw(1e-3).init(jnp.ones(4)),
        "l": [None, jnp.ones(1)],
        "e": {},
        "t": ((), []),
    }
    checkpoint.save(tmp_path / "run", held)
    checkpoint.merge(tmp_path / "run", tmp_path / "merged")
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, held)
    with ocp.StandardCheckpointer() as reader:
        restored = reader.restore(tmp_path / "merged" / "0" / "state", like)
        plain = reader.restore(tmp_path / "run" / "0" / "state")
    assert jax.tree.structure(restored) == jax.tree.structure(held)
    for folder in ("run", "merged"):
        assert jax.tree.structure(checkpoint.restore(tmp_path / folder)) == jax.tree.structure(plain)
    assert checkpoint.restore(tmp_path / "run", only="l/*")["l"][0] is None
    assert checkpoint.restore(tmp_path / "run", only="p").keys() == {"p"}


def test_a_renamed_array_replaces_a_node_without_arrays(tmp_path):
    checkpoint.save(tmp_path, {"p": jnp.ones(4), "q": jnp.ones(2), "e": {}, "n": None})
    restored = checkpoint.restore(tmp_path, name_map={"p": "e/w", "q": "n"})
    assert jax.tree.map(jnp.shape, restored) == {"e": {"w": (4,)}, "n": (2,)}


@pytest.mark.parametrize("spec", [P(), P(None, "b")], ids=str)
def test_copies_decode_each_large_chunk_of_others_once(tmp_path, spec):
    value = np.random.default_rng(0).normal(size=(1024, 1024)).astype("float32")
    standard(tmp_path / "orbax", {"w": jax.device_put(value, NamedSharding(mesh(2, 4), spec))})
    layout = LayoutFile(mesh=(("a", 4),), others=((), "a"))
    calls = {
        "merged": lambda: checkpoint.merge(tmp_path / "orbax", tmp_path / "merged", memory="1MiB"),
        "half": lambda: checkpoint.merge(tmp_path / "orbax", tmp_path / "half", memory="1MiB", dtype="bfloat16"),
        "columns": lambda: checkpoint.relayout(tmp_path / "orbax", tmp_path / "columns", layout, memory="1MiB"),
        "file": lambda: checkpoint.export_safetensors(tmp_path / "orbax", tmp_path / "w.safetensors", memory="1MiB"),
    }
    for name, call in calls.items():
        before = arrays.bytes_read()
        call()
        assert arrays.bytes_read() - before < 1.2 * value.nbytes, name
    for name, dtype in (("merged", "float32"), ("half", "bfloat16"), ("columns", "float32")):
        same(checkpoint.restore(tmp_path / name, jax.devices()[0])["w"], jnp.asarray(value).astype(dtype))
    checkpoint.import_safetensors(tmp_path / "w.safetensors", tmp_path / "file")
    same(checkpoint.restore(tmp_path / "file")["w"], value)
