"""`load_distributed_checkpoint`: what a training run saved, in every form, into every layout; values are held against the run's."""

import contextlib
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn import AUTO, checkpoint, train
from shardfn.checkpoint import arrays
from shardfn.errors import CheckpointError, NotAvailableError, StrategyError
from shardfn.mindspore import Cell, Layout, auto_parallel, infer_predict_layout, load_distributed_checkpoint
from tests.messages import refusal, told

UP = np.arange(64 * 128, dtype="float32").reshape(64, 128) / 8192
DOWN = np.cos(np.arange(128 * 32, dtype="float32")).reshape(128, 32)
LIKE = {"up": jax.ShapeDtypeStruct(UP.shape, "float32"), "down": [jax.ShapeDtypeStruct(DOWN.shape, "float32")]}
X = jax.ShapeDtypeStruct((8, 64), "float32")
CUTS = {"up": (1, 4), "down/*": (4, 1)}
PIECES = {"up": (64, 32), "down": (32, 32)}


def serve(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"][0]


def four():
    return jax.devices()[:4]


def predicted():
    return infer_predict_layout(serve, LIKE, X, parameter_plan=CUTS, device=four())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on eight devices with the state of Adam, rows of `up` and columns of `down` in pieces."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    params = {"up": put(UP, "data"), "down": [put(DOWN, None, "data")]}
    state = train.step(lambda p, x: jnp.sum(serve(p, x)), optax.adam(1.0), mode="stand_alone").init(
        jax.tree.map(np.zeros_like, params)
    )
    path = tmp_path_factory.mktemp("run")
    checkpoint.save(path, state._replace(params=params), step=7)
    return path


def holds(weights, pieces=PIECES, dtype="float32", count=4):
    up, down = weights["up"], weights["down"][0]
    np.testing.assert_array_equal(np.asarray(up), UP.astype(dtype))
    np.testing.assert_array_equal(np.asarray(down), DOWN.astype(dtype))
    assert {"up": up.sharding.shard_shape(up.shape), "down": down.sharding.shard_shape(down.shape)} == pieces
    assert len(up.sharding.device_set) == count
    return True


def rows(matrix=(4,)):
    return {
        "up": {"dev_matrix": list(matrix), "tensor_map": [-1, 0], "tensor_shape": [64, 128]},
        "down.0": {"dev_matrix": list(matrix), "tensor_map": [0, -1], "tensor_shape": [128, 32]},
    }


def strategy_file(path, **items):
    path.write_text(json.dumps({"current_stage": 1, "parallel_layout_item": items, "parallel_strategy_item": {}}))
    return path


def toml(folder):
    path = folder / "four.toml"
    path.write_text(
        'format = "shardfn-layout"\nversion = 2\n[mesh]\nm = 4\n[arguments]\nup = [1, "m"]\n"down/*" = ["m", 1]\n'
    )
    return path


STRATEGIES = {
    "what was predicted": lambda folder: predicted(),
    "the layouts in it": lambda folder: dict(predicted()),
    "its plan": lambda folder: predicted().plan,
    "a layout file": toml,
    "MindSpore's JSON": lambda folder: strategy_file(folder / "four.json", **rows()),
    "rows of such JSON": lambda folder: rows(),
    "entries by glob": lambda folder: CUTS,
    "entries in a pytree": lambda folder: {"up": (1, 4), "down": [Layout((4,), ("m",))("m", "None")]},
    "its shardings": lambda folder: {"up": predicted().shardings()["up"], "down": [predicted().shardings()["down/0"]]},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_to_say_where(strategy, run, tmp_path):
    weights = load_distributed_checkpoint(serve, run, STRATEGIES[strategy](tmp_path), like=LIKE, device=four())
    assert holds(weights)


def test_without_a_strategy_all_on_one_device(run):
    assert holds(load_distributed_checkpoint(serve, run), {"up": (64, 128), "down": (128, 32)}, count=1)
    weights = load_distributed_checkpoint(serve, run, device=jax.devices()[3:5])
    assert weights["up"].sharding.device_set == {jax.devices()[3]}
    whole = {"up": (64, 128), "down": (128, 32)}
    assert holds(load_distributed_checkpoint(serve, run, jax.devices()[5]), whole, count=1)
    assert holds(load_distributed_checkpoint(serve, run, jax.devices()[:2]), whole, count=2)


def test_one_entry_stands_for_all(run):
    assert holds(load_distributed_checkpoint(serve, run, (4, 1), device=four()), {"up": (16, 128), "down": (32, 32)})
    pieces = {"up": (64, 128), "down": (32, 32)}
    assert holds(
        load_distributed_checkpoint(serve, run, {"up": AUTO, "down": (4, 1)}, like=LIKE, device=four()), pieces
    )


def test_the_served_function_moves_nothing(run):
    layout = predicted()
    weights = load_distributed_checkpoint(serve, run, layout)
    assert weights["up"].sharding.is_equivalent_to(layout.shardings()["up"], 2)
    assert weights["up"].sharding.mesh == layout.plan.mesh


def test_a_plan_on_paper_is_loaded_where_the_count_is_here(run):
    layout = infer_predict_layout(serve, LIKE, X, parameter_plan=CUTS, device="tpu-v5e:8")
    assert holds(load_distributed_checkpoint(serve, run, layout), count=8)


def test_the_optimizer_is_not_read(run):
    before = arrays.bytes_read()
    checkpoint.restore(run, jax.devices()[0], only="params/*")
    between = arrays.bytes_read()
    load_distributed_checkpoint(serve, run)
    assert 0 < arrays.bytes_read() - between == between - before


# ---- sources


def slices(folder, ranks=8):
    """The files of the ranks of a run: `up` cut 2 ways by rows, each slice again by the optimizer; `down` 4 ways by columns."""
    strategy = strategy_file(
        folder / "train.json",
        **{"up": {"dev_matrix": [2, 4], "tensor_map": [1, -1], "tensor_shape": [64, 128], "opt_weight_shard_size": 4,
                  "opt_weight_shard_step": 1},
           "down.0": {"dev_matrix": [2, 4], "tensor_map": [-1, 0], "tensor_shape": [128, 32]}},
    )  # fmt: skip
    files = []
    for rank in range(ranks):
        file = folder / f"rank_{rank}" / "run_1.safetensors"
        file.parent.mkdir()
        held = {
            "up": UP[rank * 8 : rank * 8 + 8],
            "down.0": DOWN[:, rank % 4 * 8 : rank % 4 * 8 + 8],
            "step": np.int32(3),
        }
        safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in held.items()}, str(file))
        files.append(file)
    return files, strategy


@pytest.mark.parametrize("form", ["files", "folder", "context"])
def test_files_of_ranks(form, tmp_path):
    files, strategy = slices(tmp_path)
    layout = predicted()
    if form == "context":
        with auto_parallel(strategy_ckpt_config={"load_file": str(strategy)}):
            assert holds(load_distributed_checkpoint(serve, files, layout))
    else:
        assert holds(load_distributed_checkpoint(serve, files if form == "files" else tmp_path, layout, strategy))


@pytest.mark.parametrize("form", ["file", "folder", "unified", "list"])
def test_whole_safetensors(form, tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"up": UP, "down.0": DOWN}, str(file))
    if form == "unified":
        weights = load_distributed_checkpoint(
            serve, None, predicted(), format="safetensors", unified_safetensors_dir=tmp_path
        )
    else:
        where = {"file": file, "folder": tmp_path, "list": [file]}[form]
        weights = load_distributed_checkpoint(serve, where, predicted())
    assert holds(weights)
    assert holds(load_distributed_checkpoint(serve, file), {"up": (64, 128), "down": (128, 32)}, count=1)


def test_the_strategy_of_the_run_is_held_against_its_checkpoint(run, tmp_path):
    right = {"up": {"dev_matrix": [8], "tensor_map": [0, -1]}, "down.0": {"dev_matrix": [8], "tensor_map": [-1, 0]}}
    load_distributed_checkpoint(serve, run, None, strategy_file(tmp_path / "right.json", **right))
    with pytest.raises(CheckpointError, match="was saved with the strategy") as error:
        load_distributed_checkpoint(serve, run, None, strategy_file(tmp_path / "wrong.json", **rows((8,))))
    assert len(error.value.problems) == 2


# ---- names, dtypes, what is missing


def test_dtypes(run):
    low = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "bfloat16"), LIKE)
    assert holds(load_distributed_checkpoint(serve, run, predicted(), like=low), dtype=jnp.bfloat16)
    assert holds(load_distributed_checkpoint(serve, run, predicted(), dtype="bfloat16"), dtype=jnp.bfloat16)
    weights = load_distributed_checkpoint(serve, run, predicted(), like=low, dtype={"up": "float32"})
    assert (weights["up"].dtype, weights["down"][0].dtype) == (jnp.float32, jnp.bfloat16)


def test_a_flat_dict(run):
    flat = load_distributed_checkpoint(serve, run, predicted(), return_param_dict=True)
    assert set(flat) == {"up", "down/0"}


@pytest.mark.parametrize("name_map", [{"ema": "params"}, {"ema": ""}, {"ema/up": "up", "ema/down": "down"}])
def test_names_are_mapped(name_map, tmp_path):
    other = {"up": UP * 0, "down": [DOWN * 0]}
    checkpoint.save(tmp_path, {"ema": {"up": UP, "down": [DOWN]}, "last": other})
    with pytest.raises(CheckpointError, match="holds the weights several times"):
        load_distributed_checkpoint(serve, tmp_path, predicted())
    assert holds(load_distributed_checkpoint(serve, tmp_path, predicted(), name_map=name_map))


def test_names_in_safetensors_have_dots(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"net.in": UP, "net.out": DOWN}, str(file))
    assert holds(load_distributed_checkpoint(serve, file, predicted(), name_map={"net.in": "up", "net.out": "down.0"}))


def test_strict_takes_names_and_dtypes_as_they_are(tmp_path):
    checkpoint.save(tmp_path, {"net": {"up": UP, "down": [DOWN]}})
    assert holds(load_distributed_checkpoint(serve, tmp_path, predicted()))
    with pytest.raises(CheckpointError, match="has no `up`"):
        load_distributed_checkpoint(serve, tmp_path, predicted(), strict_load=True)
    assert holds(load_distributed_checkpoint(serve, tmp_path, predicted(), strict_load=True, name_map={"net": ""}))
    low = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "bfloat16"), LIKE)
    with pytest.raises(CheckpointError, match="strict_load casts nothing"):
        load_distributed_checkpoint(serve, tmp_path, like=low, strict_load=True, name_map={"net": ""})


def test_what_is_missing_keeps_its_value_with_a_warning(tmp_path):
    checkpoint.save(tmp_path, {"up": UP})
    like = {"up": LIKE["up"], "down": [jnp.asarray(DOWN)]}
    with pytest.warns(UserWarning, match="has no down/0: it stays as it is"):
        weights = load_distributed_checkpoint(serve, tmp_path, like=like)
    assert holds(weights, {"up": (64, 128), "down": (128, 32)}, count=1)
    for options in ({"like": like, "strict_load": True}, {"like": LIKE}):
        with pytest.raises(CheckpointError, match="has no `down/0`"):
            load_distributed_checkpoint(serve, tmp_path, **options)


# ---- modules


class Dense(Cell):
    def __init__(self):
        self.up, self.down = jnp.zeros((64, 128)), [jnp.zeros((128, 32))]

    def __call__(self, x):
        return jnp.tanh(x @ self.up) @ self.down[0]


def test_a_cell_is_loaded(run):
    cell = Dense().shard(parameter_plan=CUTS, device=four())
    assert load_distributed_checkpoint(cell, run, infer_predict_layout(cell, X)) is cell
    assert holds(vars(cell))
    x = np.ones((8, 64), "float32")
    np.testing.assert_allclose(cell(x), serve({"up": UP, "down": [DOWN]}, x), rtol=1e-4, atol=1e-5)


def test_flax_and_equinox(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    checkpoint.save(tmp_path / "nnx", {"params": {"kernel": UP, "bias": UP[0]}})
    assert load_distributed_checkpoint(model, tmp_path / "nnx", {"kernel": (1, 4)}, device=four()) is model
    np.testing.assert_array_equal(model.kernel.get_value(), UP)
    assert model.kernel.get_value().sharding.shard_shape((64, 128)) == (64, 32)
    frozen = eqx.nn.Linear(128, 64, key=jax.random.key(0))
    checkpoint.save(tmp_path / "eqx", {"weight": UP, "bias": UP[:, 0]})
    loaded = load_distributed_checkpoint(frozen, tmp_path / "eqx")
    assert type(loaded) is type(frozen) and loaded is not frozen
    np.testing.assert_array_equal(loaded.weight, UP)


# ---- errors


def problems(run, tmp_path):
    files, strategy = slices(tmp_path)
    (tmp_path / "model.npz").write_bytes(b"")
    wide = {"up": jax.ShapeDtypeStruct((64, 256), "float32"), "down": [jax.ShapeDtypeStruct((128, 32), "int32")]}
    load = load_distributed_checkpoint
    return [
        (
            "NotAvailableError: dec_key, dst_safetensors_dir, rank_id, format",
            lambda: load(serve, run, dec_key=b"secret", rank_id=0, dst_safetensors_dir="x", format="mindir"),
        ),
        ("CheckpointError: checkpoint", lambda: load(serve)),
        ("CheckpointError: checkpoint", lambda: load(serve, run, unified_safetensors_dir=tmp_path)),
        ("CheckpointError: checkpoint", lambda: load(serve, tmp_path / "nowhere")),
        ("CheckpointError: checkpoint", lambda: load(serve, tmp_path / "model.npz")),
        ("CheckpointError: checkpoint", lambda: load(serve, files)),
        ("CheckpointError: checkpoint", lambda: load(serve, files[:3], None, strategy)),
        ("CheckpointError: params/down/0, params/up", lambda: load(serve, run, like=wide)),
        (
            "StrategyError: predict_strategy['nothing'], predict_strategy['down/0'], predict_strategy['up']",
            lambda: load(serve, run, {"up": (1, 3), "down/0": (1, 1, 1), "nothing": (1,)}, like=LIKE, device=four()),
        ),
        (
            "StrategyError: predict_strategy['down.0'], predict_strategy['up']",
            lambda: load(serve, run, rows((8,)), like=LIKE, device=four()),
        ),
        ("StrategyError: predict_strategy['up']", lambda: load(serve, run, {"up": PartitionSpec("a")}, like=LIKE)),
        ("CheckpointError: device", lambda: load(serve, run, device="tpu-v5e:4")),
        ("StrategyTypeError: strict_load", lambda: load(serve, run, strict_load="yes")),
        ("CheckpointError: name_map", lambda: load(serve, run, name_map=[("a", "b")])),
        ("StrategyTypeError: weights", lambda: load(serve, run, weights=3)),
        ("CheckpointError: other", lambda: load(serve, run, like={"other": UP})),
        ("CheckpointError: predict_strategy", lambda: load(serve, run, "dlrm/fsdp", like=LIKE)),
        (
            "StrategyError: predict_strategy['down'][0]",
            lambda: load(serve, run, {"up": (1, 4), "down": [(1, 3)]}, like=LIKE, device=four()),
        ),
        ("StrategyTypeError: like", lambda: load(serve, run, like=UP)),
        ("CheckpointError: like", lambda: load(Dense(), run, like=LIKE)),
    ]


def test_bad_load_is_refused_with_type_place_and_fix(run, tmp_path):
    for expected, call in problems(run, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            error = refusal(call)
        assert told(error) == expected
        assert "secret" not in str(error)


def test_message_of_a_bad_load_reads_as_the_golden_file(run, golden):
    call = lambda: load_distributed_checkpoint(  # noqa: E731
        serve, run, {"up": (1, 3), "down/0": (1, 1, 1), "nothing": (1,)}, like=LIKE, device=four()
    )
    golden("messages_loading", str(refusal(call)))


def test_kinds_of_errors(run):
    with pytest.raises(NotAvailableError) as error:
        load_distributed_checkpoint(serve, run, dec_key="k", max_process_num=2)
    assert len(error.value.problems) == 2
    with pytest.raises(StrategyError):
        load_distributed_checkpoint(serve, run, {"up": (1, 3)}, like=LIKE)
    with contextlib.suppress(CheckpointError):
        load_distributed_checkpoint(serve, run, step=6)
        raise AssertionError("there is no step 6")
