"""NetKet: quantum states."""

import os

# It would switch double precision on, and set a global mesh, for every test.
os.environ.update(NETKET_ENABLE_X64="0", NETKET_SHARDING="0")

import jax
import netket as nk

from tests.ecosystem.rows import Row, check, integers, table


def amplitudes(module):
    def make():
        x = (2.0 * integers(2, 64, 8) - 1).astype("float32")
        params = module.init(jax.random.key(0), x)
        return Row(lambda p, x: module.apply(p, x).real, (params, x), batch=(1,), gradient=False, tolerance=1e-3)

    return make


ROWS = {
    "RBM": amplitudes(nk.models.RBM(alpha=2)),
    "complex RBM": amplitudes(nk.models.RBM(alpha=1, param_dtype=jax.numpy.complex64)),
    "Jastrow": amplitudes(nk.models.Jastrow()),
}


@table(__name__, ROWS)
def test_netket_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
