"""`cluster.run` in one process: a run that stops and goes on, on other devices too, has the losses of one that does not stop."""

import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import ShardError, checkpoint, cluster, data, train
from shardfn.errors import CheckpointError, CheckpointFileError, StrategyError

X = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
PARAMS = {"w": np.random.default_rng(1).normal(size=(6, 24)).astype("float32"), "v": np.ones(24, "float32")}


def loss(params, x, y, key):
    hidden = jnp.tanh(x @ params["w"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    return jnp.mean((jnp.where(kept, hidden, 0) @ params["v"] - y) ** 2)


def make_step(devices):
    sharded = {"parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
    return train.step(loss, optax.adam(0.1), mode="semi_auto_parallel", device=devices, **sharded), PARAMS


def batches(devices):
    return data.load(
        (X, X.sum(1)), "data_parallel", batch_size=24, shuffle=True, seed=3, epochs=None, device=devices, prefetch=0
    )


class Trained:
    """Runs into one folder; the losses by step, and what was said."""

    def __init__(self, folder, make_step=make_step, data=batches, **options):
        self.losses, self.said, self.folder = {}, [], folder
        self.fixed = {"every": 2, "key": jax.random.key(5), **options}
        self.make_step, self.data = make_step, data

    def until(self, steps, count=8, **options):
        kept = {"after_step": lambda i, value: self.losses.update({i: float(value)}), "say": self.said.append}
        return cluster.run(self.make_step, self.data, self.folder, steps=steps, devices=jax.devices()[:count],
                           **kept | self.fixed | options)  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    whole = Trained(tmp_path_factory.mktemp("whole"))
    whole.until(9)
    return whole.losses


def test_run_on_8_then_6_then_8_devices_has_the_losses_of_an_uninterrupted_one(tmp_path, uninterrupted):
    drill = Trained(tmp_path)
    drill.until(3)
    second = drill.until(6, 6, key=jax.random.key(0))  # the key is that of the checkpoint
    assert (second.resumed_from, second.steps) == (3, 6)
    assert len(second.state.params["w"].sharding.device_set) == 6
    assert second.state.opt_state[0].mu["w"].addressable_shards[0].data.size == 24, "sharded 6 ways"
    third = drill.until(9)
    assert len(third.state.params["w"].sharding.device_set) == 8 and int(third.state.step) == 9
    assert [drill.losses[i] for i in (1, 2, 3)] == [uninterrupted[i] for i in (1, 2, 3)]
    np.testing.assert_allclose([*drill.losses.values()], [*uninterrupted.values()], rtol=1e-4)
    assert drill.said == [
        "goes on from step 3, saved on 8 devices in 1 process: now 6 devices in 1 process",
        "goes on from step 6, saved on 6 devices in 1 process: now 8 devices in 1 process",
    ]


def test_run_that_stops_in_between_goes_on_bit_by_bit_from_the_last_whole_checkpoint(tmp_path, uninterrupted):
    drill = Trained(tmp_path)

    def stops(step, value):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.run(make_step, batches, tmp_path, steps=9, after_step=stops, **drill.fixed)
    assert checkpoint.steps(tmp_path) == (2, 4)
    assert drill.until(9).resumed_from == 4
    assert drill.losses == {i: uninterrupted[i] for i in range(5, 10)}
    assert drill.until(9).value is None, "nothing is left to do"


def test_run_with_a_damaged_last_checkpoint_takes_the_one_before(tmp_path, uninterrupted):
    drill = Trained(tmp_path)
    drill.until(4)
    damage(tmp_path / "4")
    assert drill.until(9).resumed_from == 2
    assert drill.losses == uninterrupted
    assert drill.said[0] == f"step 4 cannot be read, and is now in {tmp_path / 'damaged'}"
    with pytest.raises(CheckpointFileError):
        checkpoint.verify(tmp_path / "damaged", 4)
    assert checkpoint.steps(tmp_path) == (6, 8, 9)
    for step in (6, 8, 9):
        damage(tmp_path / str(step))
    with pytest.raises(CheckpointFileError, match="9/state"):
        drill.until(9)
    assert checkpoint.steps(tmp_path) == (6, 8, 9), "they stay, for somebody to look at"


def damage(step: pathlib.Path) -> None:
    for file in (path for path in (step / "state").rglob("d/*") if path.is_file()):
        held = bytearray(file.read_bytes())
        held[::50] = bytes(byte ^ 1 for byte in held[::50])
        file.write_bytes(held)


def test_run_takes_any_step_and_any_iterable(tmp_path):
    def plain(devices):
        return lambda state, x: (state + x.sum(), state), jnp.zeros(())

    numbers = [np.full(3, i, "float32") for i in range(6)]
    first = Trained(tmp_path, plain, lambda devices: iter(numbers), key=None)
    first.until(3)
    assert float(first.until(6).state) == 45 and first.losses == {1: 0, 2: 0, 3: 3, 4: 9, 5: 18, 6: 30}
    with pytest.raises(ShardError, match="the data end after 6 of 7 steps"):
        first.until(7)
    with pytest.raises(ShardError, match="`every` cannot be 0"):
        first.until(7, every=0)


def test_run_with_a_state_on_no_device_in_particular_goes_on_where_the_batches_are(tmp_path):
    @jax.jit
    def step(state, x, y):
        return {"w": state["w"] - x.mean(0) * y.sum(), "key": jax.random.split(state["key"])[0]}, state["w"].sum()

    plain = Trained(tmp_path, lambda devices: (step, {"w": jnp.zeros(6), "key": jax.random.key(0)}), key=None)
    for steps, count in ((2, 8), (4, 8), (6, 6)):
        done = plain.until(steps, count)
    assert len(plain.losses) == 6 and len(done.state["key"].sharding.device_set) == 6
    plain.data = [(X, X)] * 9
    with pytest.raises(StrategyError, match="a list_iterator has no `set_state`"):
        plain.until(8)
    plain.make_step = lambda devices: (step, {"w": jnp.zeros(7), "key": jax.random.key(0)})
    with pytest.raises(CheckpointError, match="of another model or optimizer"):
        plain.until(8)


def test_run_that_gets_sigterm_saves_and_ends(tmp_path, uninterrupted):
    drill = Trained(tmp_path, every=100)
    tell = lambda step, value: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None  # noqa: E731
    with pytest.raises(SystemExit) as ended:
        drill.until(9, after_step=tell)
    assert ended.value.code == 143 and checkpoint.steps(tmp_path) == (3,)
    assert "SIGTERM" in drill.said[-1] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert drill.until(5).resumed_from == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"steps": 0, "keep": True, "after_step": 3, "make_step": None}, "(?s)^4 problems.*`make_step` is None"),
        ({"make_step": lambda devices: make_step(devices)[0]}, r"make_step\(devices\) returns an? "),
        (
            {"make_step": lambda devices: (lambda state, *batch: state, jnp.zeros(4))},
            r"step\(state, \*batch\) returns an? ",
        ),
        ({"data": 5}, "`data` is an int, and no batches"),
        ({"key": 3}, "`key` is an int, and no PRNG key"),
    ],
)
def test_run_with_wrong_arguments_says_what_is_wrong(tmp_path, change, match):
    arguments = {"make_step": make_step, "data": batches, "checkpoint_dir": tmp_path, "steps": 2, **change}
    with pytest.raises(StrategyError, match=match):
        cluster.run(**arguments)
    assert not list(tmp_path.iterdir())
