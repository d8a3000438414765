"""`infer_predict_layout`: the layout of every weight of a call, and nothing runs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import shardfn
from shardfn import shard
from shardfn.errors import ContextError, StrategyError, StrategyTypeError
from shardfn.mindspore import Cell, auto_parallel, infer_predict_layout
from shardfn.mindspore.parallel import layout_of


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")


def serve(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"][0]


PARAMS = {"up": shape(64, 256), "down": [shape(256, 32)]}
CUTS = {"up": (1, 4), "down/0": (4, 1)}
X = shape(8, 64)


def test_layouts_are_mindspores():
    found = infer_predict_layout(serve, PARAMS, X, parameter_plan=CUTS | {"x": (2, 1)}, device=jax.devices())
    assert set(found) == {"up", "down/0"}
    matrix, tensor_map, piece, field, uniform, group, whole = found["up"]
    assert (piece, field, uniform, group, whole) == ((64, 64), 0, True, "", (64, 256))
    assert found["down/0"].slice_shape == (64, 32)
    layout = shardfn.mindspore.Layout.from_tensor_map(matrix, tensor_map)
    assert layout.strategy == (1, 4) and layout.size == 8
    assert layout.slices(whole)[0] == layout_of(found.plan, "params/up").slices(whole)[0]
    assert found.shardings()["up"].shard_shape((64, 256)) == (64, 64)
    assert "down/0  float32[256,32]  (4, 1)" in str(found) and repr(found) == "<PredictLayout of serve: 2 weights>"


def test_nothing_runs_and_no_device_is_needed():
    ran = []

    def watched(params, x):
        jax.debug.callback(lambda: ran.append(1))
        return serve(params, x)

    found = infer_predict_layout(watched, PARAMS, X, parameter_plan=CUTS, device="tpu-v5e:4x4")
    assert found.plan.hardware.count == 16 and not ran


def test_a_sharded_function_keeps_its_options():
    function = shard(serve, parameter_plan=CUTS, device=jax.devices()[:4])
    found = infer_predict_layout(function, PARAMS, X)
    assert found["up"].slice_shape == (64, 64) and found.plan == function.plan(PARAMS, X)


def test_compiled_too_on_request():
    found = infer_predict_layout(serve, PARAMS, X, parameter_plan=CUTS, skip_backend_compile=False)
    assert found["up"].slice_shape == (64, 64)


@pytest.mark.parametrize(
    ("weights", "names"),
    [(None, {"w"}), ("b", {"b"}), (("a", "p"), {"a", "p/w"}), ("p", {"w"})],
)
def test_weights_are_the_first_pytree_or_what_is_named(weights, names):
    found = infer_predict_layout(lambda a, b, p: (a + b) @ p["w"], shape(8, 8), shape(8, 8), {"w": shape(8, 8)},
                                 weights=weights)  # fmt: skip
    assert set(found) == names and all(found[name].full_shape == (8, 8) for name in names)


class Dense(Cell):
    def __init__(self):
        self.up, self.down = jnp.ones((64, 256)), jnp.ones((256, 32))

    def __call__(self, x):
        return jnp.tanh(x @ self.up) @ self.down


def test_a_cell_by_its_arrays():
    cell = Dense()
    assert infer_predict_layout(cell, X, parameter_plan={"up": (1, 4)})["up"].slice_shape == (64, 64)
    cell.shard(in_strategy=((2, 1),), parameter_plan={"up": (1, 2)})
    assert infer_predict_layout(cell, X)["up"].slice_shape == (64, 128)


def test_only_modes_that_cut():
    for mode in ("stand_alone", "data_parallel", "hybrid_parallel"):
        with auto_parallel(parallel_mode=mode), pytest.raises(ContextError, match="only supports semi auto parallel"):
            infer_predict_layout(serve, PARAMS, X)
    with auto_parallel(parallel_mode="semi_auto_parallel"):
        assert infer_predict_layout(serve, PARAMS, X, parameter_plan=CUTS)["up"].slice_shape == (64, 64)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (StrategyError, {"weights": "params"}, "has no argument `params`"),
        (StrategyError, {}, "no argument of `dot` is a pytree"),
        (StrategyTypeError, {"weights": ()}, "names no argument"),
        (StrategyTypeError, {"weights": "w", "skip_backend_compile": 1}, "must be a bool, not an int"),
    ],
)
def test_problems(kind, options, text):
    def dot(x, w):
        return x @ w

    with pytest.raises(kind, match=text) as error:
        infer_predict_layout(dot, X, shape(64, 8), **options)
    assert "fix:" in str(error.value)


def test_flax_and_equinox():
    nnx = pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")
    flax_model = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    assert infer_predict_layout(flax_model, X, parameter_plan={"kernel": (1, 4)})["kernel"].slice_shape == (64, 64)
    eqx_model = eqx.nn.Linear(64, 256, key=jax.random.key(0))
    found = infer_predict_layout(eqx_model, shape(64), parameter_plan={"weight": (4, 1)})
    assert found["weight"].slice_shape == (64, 64)
    assert found.shardings()["weight"].spec == PartitionSpec(found.plan.axes[0][0], None)
