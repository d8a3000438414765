"""Fixes that errors name for people from MindSpore: what they say is accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn.mindspore as ms
from shardfn import checkpoint, data, train
from tests.messages import refusal

X, Y, W = np.ones((80, 4), np.float32), np.ones((80, 2), np.float32), jnp.ones((4, 2))
BY_STRATEGY = {"w": {"dev_matrix": [2], "tensor_map": [0, -1], "tensor_shape": [8, 4]}}


class Dense(ms.Cell):
    def __init__(self):
        self.w = jnp.ones(4)

    def construct(self, x):
        return x * self.w


def batch_strategies(dataset_strategy):
    with ms.auto_parallel(parallel_mode="semi_auto_parallel", dataset_strategy=dataset_strategy):
        step = train.step(lambda p, x, y: jnp.mean((x @ p - y) ** 2), optax.sgd(0.1))
        return [d.strategy for d in step.plan(step.init(W, X, Y), X, Y).inputs[-2:]]


def test_an_entry_for_data_is_no_auto():
    error = refusal(lambda: data.load((X, Y), ((2, 4),), batch_size=40))
    assert error.problems[0].fix.endswith("strategy=((2, 4), None)")
    data.load((X, Y), ((2, 4), None), batch_size=40)


@pytest.mark.parametrize(
    ("given", "fixed"), [(((2, 1),), ((2, 1), None)), (((2, 1), (4, 1), (2, 1)), ((2, 1), (4, 1)))]
)
def test_dataset_strategy_of_another_number_of_inputs(given, fixed):
    error = refusal(batch_strategies, given)
    assert error.problems[0].fix.endswith(f"dataset_strategy={fixed}")
    assert batch_strategies(fixed)[0] == (2, 1)


@pytest.mark.parametrize("segments", [1, 2])
def test_an_empty_segment_is_called_one(segments):
    def loss(params, x):
        for i in range(2 * segments):
            x = train.staged(lambda w, x: jnp.tanh(x @ w), i % 2, i // 2)(params[i], x)
        return jnp.mean(x)

    pipe = train.pipeline(loss, micro_size=2, pipeline_stages=2, interleave=2, device=jax.devices()[:2])
    params = [jnp.eye(4)] * 2 * segments
    if segments == 2:
        assert np.isfinite(pipe(params, X))
        return
    error = refusal(pipe, params, X)
    assert "segment 1 of pipeline stage 0 is empty" in str(error) and "pipeline_segment = 1" in error.problems[0].fix


def test_a_cell_is_saved_by_its_arrays(tmp_path):
    cell = Dense()
    assert "cell.parameters_dict()" in refusal(checkpoint.save, tmp_path, cell).problems[0].fix
    checkpoint.save(tmp_path, cell.parameters_dict())
    assert checkpoint.restore(tmp_path, like=cell.parameters_dict())["w"].shape == (4,)


@pytest.mark.parametrize(("stored", "named", "said"), [
    ("", "params.", "begin with `params.`: leave name_map={'params': ''} out"),
    ("params.", "", "leave `params.` out of the names: export_safetensors(..., name_map={'params': ''})"),
    ("net.", "params.", "renames what is written"),
])  # fmt: skip
def test_names_of_a_strategy_file(stored, named, said, tmp_path):
    checkpoint.save(tmp_path / "run", {f"{stored}w": jnp.ones((8, 4))})
    (tmp_path / "source/rank_0").mkdir(parents=True)
    checkpoint.export_safetensors(tmp_path / "run", tmp_path / "source/rank_0/net.safetensors")
    strategy = {f"{named}w": BY_STRATEGY["w"]}
    error = refusal(ms.transform_checkpoints, tmp_path / "source", tmp_path / "to", "net", None, strategy)
    assert said in error.problems[0].fix


def test_a_loss_that_is_no_scalar_is_shown_by_its_shape():
    step = train.step(lambda p, x: x @ p, optax.sgd(0.1), mode="data_parallel")
    assert refusal(step.init, W, X).problems[0].where in ("loss: float32[80, 2]", "loss: float32[10, 2]")


def test_a_list_of_words_is_no_list_of_devices():
    error = refusal(lambda: Dense().shard(((2, 1),), parameter_plan=["w"])(X))
    assert "parameter_plan" in error.problems[0].where


def test_a_rank_that_there_is_not():
    problem = refusal(ms.rank_list_for_transform, 99, BY_STRATEGY, BY_STRATEGY).problems[0]
    assert (problem.where, problem.why) == ("rank_id = 99", "its ranks are 0 to 1")


def test_one_micro_batch():
    pipe = train.pipeline([lambda w, x: x @ w, lambda w, x: jnp.mean(x @ w)], micro_size=1, device=jax.devices()[:2])
    params = [jnp.eye(4)] * 2
    assert "1 micro-batch:" in str(pipe.describe(params, X)) and "1 micro-batch:" in str(pipe.schedule)
