import enum
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardfn import checkpoint, train
from shardfn.checkpoint import step_folders
from shardfn.errors import CheckpointError
from tests.checkpoint.states import plain, same, training
from tests.messages import refusal

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def state():
    return training()


def test_round_trip(tmp_path, state):
    saving = checkpoint.save(tmp_path, state, step=3)
    assert (saving.step, checkpoint.steps(tmp_path)) == (3, (3,))
    back = checkpoint.restore(tmp_path, like=state)
    same(back, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert type(back["step"]) is int and type(back["rate"]) is float
    assert back["key"].dtype == state["key"].dtype
    for old, new in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(back["params"]), strict=True):
        assert old.sharding.is_equivalent_to(new.sharding, old.ndim)


def test_without_a_structure_it_is_dicts_and_lists(tmp_path, state):
    checkpoint.save(tmp_path, state)
    back = checkpoint.restore(tmp_path)
    assert set(back) == set(state)
    assert isinstance(back["params"]["layers"], list)
    same(back["params"], state["params"])
    assert set(back["opt"][0]) == {"count", "mu", "nu"}, "a named tuple is a dict of its fields"
    assert (back["step"], back["rate"]) == (7, 0.25)


@pytest.mark.parametrize(
    "bare", [jnp.arange(6.0), np.float32(2), 5, [jnp.ones(2), {"a": 1}], {1: jnp.ones(2), 20: (3,)}]
)
def test_any_tree(tmp_path, bare):
    checkpoint.save(tmp_path, bare)
    same(checkpoint.restore(tmp_path, like=bare), bare)
    same(checkpoint.restore(tmp_path), bare)


def test_modules(tmp_path):
    linear = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    state = nnx.state(linear)
    mlp = eqx.nn.MLP(2, 3, 8, 2, key=jax.random.key(1))
    arrays = eqx.filter(mlp, eqx.is_array)
    checkpoint.save(tmp_path, {"nnx": state, "eqx": arrays})
    zeros = jax.tree.map(jnp.zeros_like, {"nnx": state, "eqx": arrays})
    back = checkpoint.restore(tmp_path, like=zeros)
    same(back, {"nnx": state, "eqx": arrays})
    nnx.update(linear, back["nnx"])
    assert eqx.combine(back["eqx"], mlp)(jnp.ones(2)).shape == (3,)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int2", "int4", "int8", "uint16", "int32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
     "float8_e8m0fnu", "float8_e3m4", "float4_e2m1fn"],
)  # fmt: skip
def test_dtypes(tmp_path, dtype):
    state = {"x": jnp.arange(1, 49).reshape(8, 6).astype(dtype)}
    checkpoint.save(tmp_path, state)
    same(checkpoint.restore(tmp_path, jax.devices()[1]), state)
    same(checkpoint.restore(tmp_path, like=state), state)
    checkpoint.merge(tmp_path, tmp_path / "copy")
    same(checkpoint.restore(tmp_path / "copy", like=state), state)


def test_steps_and_retention(tmp_path):
    for step in range(7):
        checkpoint.save(tmp_path, {"x": jnp.full(4, step)}, step=step, keep=2, keep_every=3)
    assert checkpoint.steps(tmp_path) == (0, 3, 5, 6)
    assert checkpoint.restore(tmp_path)["x"][0] == 6
    assert checkpoint.restore(tmp_path, step=3)["x"][0] == 3
    assert checkpoint.save(tmp_path, {"x": jnp.zeros(1)}).step == 7


def test_in_the_background(tmp_path):
    x = jnp.arange(1 << 20, dtype="float32")
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    savings = []
    for step in range(3):
        savings.append(checkpoint.save(tmp_path, {"x": x}, step=step, background=True))
        x = double(x)  # the memory that is being written is given away meanwhile
    assert checkpoint.steps(tmp_path) == (0, 1, 2), "asking waits for what is under way"
    savings[-1].wait()
    for step in range(3):
        np.testing.assert_array_equal(checkpoint.restore(tmp_path, step=step)["x"], np.arange(1 << 20) * 2.0**step)


def test_numpy_arrays_may_change_meanwhile(tmp_path):
    x = np.zeros(1 << 20)
    saving = checkpoint.save(tmp_path, {"x": x}, background=True)
    x[:] = 1
    saving.wait()
    assert not np.asarray(checkpoint.restore(tmp_path)["x"]).any()


def test_the_layout_stands_beside_the_arrays(tmp_path, state):
    checkpoint.save(tmp_path, state["params"])
    file = tmp_path / "0" / "layout" / "layout.toml"
    text = file.read_text()
    assert '"w1" = [1, "b"]' in text and "a = 2" in text
    same(checkpoint.restore(tmp_path, file), plain(state["params"]))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("the state has no arrays", lambda path: checkpoint.save(path, {})),
        ("two arrays have the path `a/b`", lambda path: checkpoint.save(path, {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})),
        ("Orbax gives `a.b` and `a/b` one name", lambda path: checkpoint.save(path, {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})),
        ("`x` has the dtype uint4", lambda path: checkpoint.save(path, {"x": jnp.ones(2, "uint4")})),
        ("`keep` is 0", lambda path: checkpoint.save(path, {"x": jnp.ones(2)}, keep=0)),
        ("`step` is True", lambda path: checkpoint.save(path, {"x": jnp.ones(2)}, step=True)),
        ("must be a string or a path, not an int", lambda path: checkpoint.save(3, {"x": jnp.ones(2)})),
        ("step 4 exists already", lambda path: [checkpoint.save(path, {"x": jnp.ones(2)}, step=4) for _ in range(2)]),
    ],
)  # fmt: skip
def test_save_of_what_cannot_be_saved_is_refused(tmp_path, text, call):
    error = refusal(call, tmp_path)
    assert isinstance(error, CheckpointError) and text in error.problems[0].what


@pytest.mark.parametrize("text", ["gpt-2, ünicode", b"raw"])
def test_the_bytes_of_a_text_are_saved_as_the_message_says(tmp_path, text):
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(tmp_path, {"name": text, "w": np.ones(2)})
    fix = error.value.problems[0].fix
    stored = eval(fix.partition("save its bytes, ")[2].partition(", and read")[0], {"np": np, "text": text})
    checkpoint.save(tmp_path, {"name": stored, "w": np.ones(2)})
    array = checkpoint.restore(tmp_path)["name"]
    assert eval(fix.rpartition("back by ")[2], {"array": array}) == text


def test_message_of_a_bad_state_reads_as_the_golden_file(tmp_path, golden):
    error = refusal(checkpoint.save, tmp_path, {"a": "text", "b": object(), "c": jnp.ones(2)})
    golden("messages_checkpoint_save", str(error))


@pytest.mark.parametrize("path", ["a.b", "a%2Eb", "a b", "ä", "a" * 300, "..", "con", "zarr.json", "a/b", "", "0"])
def test_any_name(tmp_path, path):
    state = {path: {path: jnp.arange(3.0)}, "other": jnp.ones(2)}
    checkpoint.save(tmp_path, state)
    same(checkpoint.restore(tmp_path, like=state), state)
    same(checkpoint.restore(tmp_path), state)


def test_the_extra_is_imported_late_and_named_where_it_is_missing():
    code = """
import sys, shardfn
assert "shardfn.checkpoint" not in sys.modules
shardfn.checkpoint.steps("nowhere")
assert not {"orbax", "tensorstore", "safetensors", "google.protobuf"} & set(sys.modules)
sys.modules["orbax"] = sys.modules["orbax.checkpoint"] = sys.modules["tensorstore"] = None
try:
    shardfn.checkpoint.save("nowhere", {"x": 1})
except ImportError as error:
    assert isinstance(error, shardfn.ShardError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 'pip install ".[checkpoint]"' in done.stdout


def test_a_program_that_ends_waits(tmp_path):
    code = f"""
import jax.numpy as jnp, shardfn
shardfn.checkpoint.save({str(tmp_path)!r}, {{"x": jnp.ones(1 << 22)}}, background=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert step_folders.steps(tmp_path) == (0,), done.stderr


def test_64_bits_are_kept(tmp_path):
    state = {"n": 2**40 + 1, "x": np.array([1 / 3]), "i": np.array([2**40])}
    checkpoint.save(tmp_path, state)
    back = checkpoint.restore(tmp_path)
    assert back["n"] == 2**40 + 1 and back["x"].dtype == "float64"
    same(back, state)


class Phase(enum.IntEnum):
    LATE = 3


class Exact(float):
    pass


@pytest.mark.parametrize(
    "number, kind",
    [(np.float64(0.1), float), (np.complex128(1 / 3 + 1j), complex), (1j / 3, complex), (Phase.LATE, int), (Exact(0.1), float),
     (True, bool), (2**63, int), (-(2**63), int)],
)  # fmt: skip
def test_numbers_that_are_python_numbers_too(tmp_path, number, kind):
    checkpoint.save(tmp_path, {"best": number})
    checkpoint.verify(tmp_path)
    for like in (None, {"best": number}):
        back = checkpoint.restore(tmp_path, like=like)
        # Orbax has no complex numbers: without `like` they are arrays.
        assert type(back["best"]) is (np.ndarray if like is None and kind is complex else kind)
        assert back["best"] == number


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, [("a", "f4")]),
        np.void(b"abc"),
        2**64,
        -(2**63) - 1,
        np.zeros(2, "complex256"),
        np.zeros(2, "float128"),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_what_could_not_be_read_is_not_saved(tmp_path, value):
    with pytest.raises(CheckpointError, match="`x`"):
        checkpoint.save(tmp_path, {"x": value, "w": np.zeros(2)})
    assert checkpoint.steps(tmp_path) == ()


def test_a_state_that_a_step_was_given_is_refused(tmp_path):
    given = {"w": jnp.ones((8, 4))}
    jax.jit(lambda state: jax.tree.map(lambda w: w + 1, state), donate_argnums=0)(given)
    with pytest.raises(CheckpointError, match="`w` is deleted") as error:
        checkpoint.save(tmp_path, given)
    assert "the state that the step returned" in error.value.problems[0].fix


class _Blocks(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_module_with_a_list_of_modules_is_restored(tmp_path):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = train.step(lambda m, x: jnp.mean(m(x) ** 2), optimizer, mode="data_parallel")
    state, _ = step(step.init(_Blocks), jnp.ones((8, 4)))
    checkpoint.save(tmp_path / "run", state)
    found = checkpoint.restore(tmp_path / "run", like=state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(state))
    alone = checkpoint.restore(tmp_path / "run")["params"]
    assert jax.tree.map(jnp.shape, alone["blocks"]) == [
        {"kernel": {"value": (4, 4)}, "bias": {"value": (4,)}, "_pytree__state": None} for _ in range(2)
    ]
