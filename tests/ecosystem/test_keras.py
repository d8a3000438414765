"""Keras on JAX: stateless calls."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

from tests.ecosystem.rows import Row, check, normal, table


def model(*layers, shape):
    def make():
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input(shape[1:]), *(layer() for layer in layers)])
        trainable = [v.value for v in net.trainable_variables]
        fixed = [v.value for v in net.non_trainable_variables]
        return Row(lambda t, f, x: net.stateless_call(t, f, x)[0], (trainable, fixed, normal(*shape)), batch=(2,))

    return make


ROWS = {
    "Dense": model(lambda: keras.layers.Dense(64, activation="relu"), lambda: keras.layers.Dense(8), shape=(64, 32)),
    "Conv2D": model(
        lambda: keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        lambda: keras.layers.GlobalAveragePooling2D(),
        shape=(16, 16, 16, 4),
    ),
    "LSTM": model(lambda: keras.layers.LSTM(32), shape=(16, 12, 8)),
}


@table(__name__, ROWS)
def test_keras_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
