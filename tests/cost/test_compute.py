"""FLOPs of linear algebra are those of Golub and Van Loan, in whatever library the factor is computed."""

import jax
import pytest

import shardfn

N = 512
MATRIX, STACK = jax.ShapeDtypeStruct((N, N), "float32"), jax.ShapeDtypeStruct((8, N, N), "float32")
CUBES = {
    "cholesky": (jax.lax.linalg.cholesky, 1 / 3),
    "lu": (lambda a: jax.lax.linalg.lu(a)[0], 2 / 3),
    "qr": (lambda a: jax.lax.linalg.qr(a)[0], 8 / 3),
}


@pytest.mark.parametrize("device", [None, "h100:8", "tpu-v5p:8"])
@pytest.mark.parametrize("name", CUBES)
def test_flops_of_factors(name, device):
    function, cubes = CUBES[name]
    is_replicated = name == "lu" and device == "tpu-v5p:8"  # XLA has no partitioning rule for it there
    for matrix, strategy in ((MATRIX, (1, 1)), (STACK, (8, 1, 1)))[: 2 - is_replicated]:
        made = shardfn.plan(function, matrix, in_strategy=(strategy,), device=device)
        assert made.cost.flops == pytest.approx(cubes * N**3, rel=0.03)
