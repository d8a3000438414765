"""Functions worked out with NumPy: the same numbers as compiled ones, and compiled where NumPy lacks something."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn.train.scan_layers.numpy_eval import numpy_jit

PARAMS = {
    "b": np.linspace(-1, 1, 3, dtype=np.float32), "h": np.ones(2, jnp.bfloat16),
    "w": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4),
}  # fmt: skip
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2), "sgd": optax.sgd(0.1, momentum=0.9), "lion": optax.lion(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(SCHEDULE)), "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2), "accumulated": optax.MultiSteps(optax.adam(1e-2), 2),
    "noisy": optax.noisy_sgd(1e-2, key=0),
}  # fmt: skip
COMPILED = {"accumulated", "noisy"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numpy_jit_of_an_optimizer_gives_the_numbers_of_jit_and_compiles_only_what_numpy_has_not(name, compiles):
    optimizer = OPTIMIZERS[name]

    def update(params, state):
        updates, state = optimizer.update(params, state, params)  # the gradients are the parameters
        return optax.apply_updates(params, updates), state

    def twice(init, update):
        params, state = PARAMS, init(PARAMS)
        for _ in range(2):
            params, state = update(params, state)
        return params

    expected = twice(jax.jit(optimizer.init), jax.jit(update))
    compiles.clear()
    found = twice(numpy_jit(optimizer.init), numpy_jit(update))
    assert not compiles or name in COMPILED
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2 if a.dtype == jnp.bfloat16 else 1e-4, atol=1e-6),
        found, expected,
    )  # fmt: skip
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
