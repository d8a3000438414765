"""Parts of JAX itself."""

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.experimental.ode import odeint

from tests.ecosystem.rows import Row, check, normal, table, uniform


def expm():
    return Row(lambda a: jax.scipy.linalg.expm(a) + a @ a, (normal(16, 16) / 8,), tolerance=2e-3)


def ode():
    return Row(
        lambda y, w: odeint(lambda y, t, w: jnp.tanh(y @ w), y, jnp.array([0.0, 0.5]), w),
        (normal(16, 8), normal(8, 8) / 3),
        gradient=False,
        tolerance=2e-3,
    )


def bcoo():
    dense = jnp.where(uniform(32, 32) > 0.8, normal(32, 32), 0)
    matrix = sparse.BCOO.fromdense(dense)
    return Row(
        lambda data, at, x: sparse.BCOO((data, at), shape=(32, 32)) @ x,
        (matrix.data, matrix.indices, normal(32, 16)),
        batch=(2,),
    )


def attention():
    return Row(
        jax.nn.dot_product_attention,
        (normal(8, 16, 4, 8), normal(8, 16, 4, 8, seed=1), normal(8, 16, 4, 8, seed=2)),
        batch=(0, 1, 2),
    )


def fourier_operator():
    def run(x, w):
        modes = jnp.fft.rfft(x, axis=1)[:, :8]
        mixed = jnp.einsum("bmc,mcd->bmd", modes, w * (1 + 0.5j))
        return jax.nn.gelu(jnp.fft.irfft(jnp.pad(mixed, ((0, 0), (0, 25), (0, 0))), axis=1))

    return Row(run, (normal(8, 64, 4), normal(8, 4, 4)))


def hoisted_loop():
    return Row(
        lambda x, w: jax.lax.fori_loop(0, 20, lambda i, h: jnp.tanh(h @ jnp.exp(w)), x),
        (normal(16, 16), normal(16, 16) / 4 - 3),
        batch=(0, 1),
    )


def callback():
    def run(x):
        jax.debug.callback(lambda a: None, x[0])
        return jnp.tanh(x) * 2

    return Row(run, (normal(64, 16),), gradient=False)


ROWS = {
    "expm": expm,
    "odeint": ode,
    "BCOO": bcoo,
    "dot_product_attention": attention,
    "Fourier neural operator": fourier_operator,
    "loop with an invariant": hoisted_loop,
    "debug.callback": callback,
    "image.resize": lambda: Row(lambda x: jax.image.resize(x, (16, 32, 32, 3), "bilinear"), (uniform(16, 16, 16, 3),)),
    "random": lambda: Row(
        lambda key, x: x + jax.random.normal(key, x.shape), (jax.random.key(0), normal(64, 16)), batch=(1,)
    ),
    "map_coordinates": lambda: Row(
        lambda x, at: jax.scipy.ndimage.map_coordinates(x, [at[0], at[1]], order=1),
        (uniform(16, 16), 15 * uniform(2, 64)),
        batch=(0,),
        tolerance=1e-3,
    ),
    "lstsq": lambda: Row(
        lambda a, b: jnp.linalg.lstsq(a, b)[0],
        (normal(64, 8), normal(64)),
        batch=(0, 1),
        gradient=False,
        tolerance=1e-3,
    ),
    "eigh": lambda: Row(lambda a: jnp.linalg.eigvalsh(a + a.mT), (normal(16, 8, 8),), tolerance=1e-3),
    "associative_scan": lambda: Row(
        lambda x: jax.lax.associative_scan(jnp.multiply, x), (uniform(64, 4) + 0.5,), tolerance=1e-3
    ),
}


@table(__name__, ROWS)
def test_jax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
