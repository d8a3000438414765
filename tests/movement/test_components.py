"""Dimensions of components: lattices of many directions send the halo of the directions that cross an edge."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.movement import with_shifts
from shardfn.movement.components import grids_of

PLANE, SPACE = [*itertools.product((0,), (-1, 0, 1), (-1, 0, 1))], [*itertools.product((-1, 0, 1), repeat=3)]
DIRECTIONS = {9: PLANE, 19: [v for v in SPACE if sum(map(abs, v)) <= 2], 27: SPACE}


def _stacked(f, moves):
    return jnp.stack([jnp.roll(f[k], move, (0, 1, 2)) for k, move in enumerate(moves)])


def _set(f, moves):
    moved = f
    for k, move in enumerate(moves):
        moved = moved.at[k].set(jnp.roll(f[k], move, (0, 1, 2)))
    return moved


def _pulled(f, moves):
    wide, shape = jnp.pad(f, ((0, 0), (1, 1), (1, 1), (1, 1)), mode="wrap"), f.shape[1:]
    windows = ([slice(1 - d, 1 - d + n) for d, n in zip(move, shape, strict=True)] for move in moves)
    return jnp.stack([wide[(k, *window)] for k, window in enumerate(windows)])


def _joined(f, moves):
    return jnp.concatenate([jnp.roll(f[k : k + 1], move, (1, 2, 3)) for k, move in enumerate(moves)])


def _lattice(move, moves):
    """A step of a lattice Boltzmann fluid: its populations collide and move."""
    along = np.array(moves, "float32")
    weights = np.array([1 / (1 + np.abs(v).sum()) ** 2 for v in along], "float32").reshape(-1, 1, 1, 1)

    def step(f):
        density = f.sum(0)
        speed = jnp.einsum("kd,kxyz->dxyz", along, f) / density
        u = jnp.einsum("kd,dxyz->kxyz", along, speed)
        rest = weights / weights.sum() * density * (1 + 3 * u + 4.5 * u**2 - 1.5 * (speed**2).sum(0))
        return move(f - 0.6 * (f - rest), moves)

    return step


@pytest.mark.parametrize("directions, grid, strategy", [(9, (1, 64, 40), (1, 1, 8, 1)), (9, (1, 64, 40), (1, 1, 2, 4)),
                                                        (19, (64, 32, 16), (1, 2, 4, 1)), (27, (48, 40, 12), (1, 8, 1, 1))])  # fmt: skip
@pytest.mark.parametrize("move", [_stacked, _set, _pulled, _joined])
def test_a_lattice_sends_the_populations_that_cross_an_edge(move, directions, grid, strategy):
    moves = DIRECTIONS[directions]
    step, shape = _lattice(move, moves), (directions, *grid)
    cells = {d: np.prod(grid) / grid[d] / np.prod(strategy) * n for d, n in enumerate(strategy[1:]) if n > 1}
    halo = sum(4 * cells[d] * sum(v[d] != 0 for v in moves) for d in cells)
    f = 1 + jax.random.uniform(jax.random.key(0), shape)
    for function, halos in ((step, 1), (jax.grad(lambda f: jnp.sin(step(f)).sum()), 2)):
        sharded = shardfn.shard(function, (strategy,), (strategy,))
        assert sharded.plan(f).cost.bytes_sent == pytest.approx(halos * halo, rel=0.001)
    np.testing.assert_allclose(sharded(f), jax.jit(function)(f), 1e-4, 1e-4)


def test_the_gradient_of_ghost_cells_that_are_read_along_one_dimension_sends_two_halos():
    def function(u):
        wide, n = jnp.pad(u, 1, mode="wrap"), len(u)
        return jnp.sin(jnp.sin(wide[:n, 1:-1, 1:-1]) + jnp.sin(3 * wide[2:, 1:-1, 1:-1])).sum()

    u = jax.random.normal(jax.random.key(0), (32, 12, 40))
    sharded = shardfn.shard(jax.grad(function), ((8, 1, 1),), ((8, 1, 1),))
    assert sharded.plan(u).cost.bytes_sent == 4 * 12 * 40 * 4
    np.testing.assert_allclose(sharded(u), jax.grad(function)(u), 1e-5, 1e-5)


@pytest.mark.parametrize("function, rows", [
    (lambda u: u[1:][::2], 0), (lambda u: u[:-1][::2] * u[1:][::2], 0), (lambda u: jnp.roll(u, -1, 0)[::2], 0),
    (lambda u: jnp.roll(u, 1, 0)[::2] + jnp.roll(u, -1, 0)[::2], 1),
])  # fmt: skip
def test_strided_rows_of_moved_ones_send_those_that_are_read(function, rows):
    u = jnp.arange(64.0 * 16).reshape(64, 16)
    sharded = shardfn.shard(function, ((8, 1),))
    plan = sharded.plan(u)
    assert plan.cost.bytes_sent == rows * 16 * 4
    assert all(
        one.where.startswith("test_components.py") or "test_components.py" in one.where for one in plan.collectives
    )
    np.testing.assert_array_equal(sharded(u), function(u))


def test_rows_of_a_grid_are_no_components():
    """The rows of a small grid that is sharded stay in place."""
    u = jnp.arange(16.0 * 16).reshape(16, 16)
    plan = shardfn.shard(lambda u: u.at[1:-1].add(u[2:] - u[:-2]).at[0].set(u[1]), ((8, 1),)).plan(u)
    assert plan.cost.bytes_sent <= 3 * 16 * 4
    assert {one.kind for one in plan.collectives} == {"collective-permute"}
    assert grids_of(jax.make_jaxpr(lambda u: u[1:] * u[:1])(u).jaxpr) == {15, 16}


def test_a_part_of_a_gradient_that_is_zero_is_left_out():
    def function(u):
        return jnp.sin(jnp.pad(u, ((0, 0), (1, 1)))[:, 1:-1]).sum() + jnp.pad(jnp.pad(u, 1)[:1], ((0, 3), (0, 0))).sum()

    u = jnp.arange(24.0).reshape(4, 6)
    made = jax.make_jaxpr(with_shifts(jax.grad(function)))(u)
    assert not [eqn for eqn in made.eqns if eqn.primitive.name == "add_any"]
    np.testing.assert_allclose(with_shifts(jax.grad(function))(u), jax.grad(function)(u), 1e-6)


def test_the_gradient_of_a_step_with_an_obstacle_in_a_loop_sends_two_halos():
    """The mask is made in the loop, of constants."""

    def step(_, f):
        inside = jnp.zeros(f.shape[1:], bool).at[10:20, 5:9].set(True)
        moved = jnp.stack([jnp.roll(f[k], move[1:], (0, 1)) for k, move in enumerate(PLANE)])
        return jnp.where(inside, moved[::-1], jnp.sin(moved))

    slope = jax.grad(lambda f: jnp.sin(jax.lax.fori_loop(0, 3, step, f)).sum())
    f = 1 + jax.random.uniform(jax.random.key(0), (9, 32, 24))
    sharded = shardfn.shard(slope, ((1, 8, 1),), ((1, 8, 1),))
    assert sharded.plan(f).cost.bytes_sent == 2 * 3 * 6 * 24 * 4  # ways, steps, directions across
    np.testing.assert_allclose(sharded(f), jax.jit(slope)(f), 1e-4, 1e-4)


def test_a_row_at_an_index_that_moves_sends_that_row():
    def function(f):
        return jnp.sin(f.at[0].set(jnp.roll(f[-1], 1, 0))).sum()

    f = jnp.arange(9.0 * 32 * 24).reshape(9, 32, 24)
    sharded = shardfn.shard(jax.grad(function), ((1, 8, 1),), ((1, 8, 1),))
    assert sharded.plan(f).cost.bytes_sent == 2 * 24 * 4
    np.testing.assert_allclose(sharded(f), jax.grad(function)(f), 1e-5, 1e-5)
