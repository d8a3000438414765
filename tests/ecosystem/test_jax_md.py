"""JAX MD: energies, forces and time steps of particles."""

import jax
from jax_md import energy, quantity, simulate, space

from tests.ecosystem.rows import Row, check, table, uniform


def lennard_jones():
    displacement, _ = space.periodic(8.0)
    return Row(energy.lennard_jones_pair(displacement), (8 * uniform(32, 2),), gradient=False, tolerance=1e-2)


def soft_forces():
    displacement, _ = space.periodic(8.0)
    return Row(quantity.force(energy.soft_sphere_pair(displacement)), (8 * uniform(32, 2),), gradient=False)


def steps():
    displacement, shift = space.periodic(8.0)
    init, apply = simulate.nve(energy.soft_sphere_pair(displacement), shift, 1e-3)

    def run(x, key):
        return jax.lax.fori_loop(0, 3, lambda i, s: apply(s), init(key, x, kT=0.1)).position

    return Row(run, (8 * uniform(32, 2), jax.random.PRNGKey(0)), gradient=False)


ROWS = {"Lennard-Jones energy": lennard_jones, "soft sphere forces": soft_forces, "NVE steps": steps}


@table(__name__, ROWS)
def test_jax_md_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
