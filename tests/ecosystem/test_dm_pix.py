"""PIX: image operations."""

import dm_pix as pix
import jax

from tests.ecosystem.rows import Row, check, table, uniform

ROWS = {
    "gaussian blur": lambda: Row(lambda x: pix.gaussian_blur(x, 1.0, 5), (uniform(16, 16, 16, 3),)),
    "rgb to hsv": lambda: Row(pix.rgb_to_hsv, (uniform(16, 8, 8, 3),), gradient=False),
    "SSIM": lambda: Row(pix.ssim, (uniform(8, 16, 16, 3), uniform(8, 16, 16, 3, seed=1)), batch=(0, 1), tolerance=1e-3),
    "rotate": lambda: Row(lambda x: jax.vmap(lambda image: pix.rotate(image, 0.3))(x), (uniform(8, 16, 16, 3),)),
}


@table(__name__, ROWS)
def test_dm_pix_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
