"""e3nn: equivariant functions."""

import e3nn_jax as e3nn

from tests.ecosystem.rows import Row, check, normal, table


def harmonics():
    return Row(
        lambda x: e3nn.spherical_harmonics("1x0e + 1x1o + 1x2e", x, True).array, (normal(64, 3),), tolerance=1e-3
    )


def product():
    def run(a, b):
        irreps = e3nn.Irreps("4x0e + 4x1o")
        return e3nn.tensor_product(e3nn.IrrepsArray(irreps, a), e3nn.IrrepsArray(irreps, b), filter_ir_out="0e").array

    return Row(run, (normal(16, 16), normal(16, 16, seed=1)), batch=(0, 1))


ROWS = {"spherical harmonics": harmonics, "tensor product": product}


@table(__name__, ROWS)
def test_e3nn_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
