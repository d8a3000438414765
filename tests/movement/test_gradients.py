"""Gradients of stencils send halos, as the stencils do, and are right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn
from shardfn.ir.rewrite import equations, inner
from shardfn.movement import with_shifts
from shardfn.runtime.verify import compile_plan

N = 64


def _laplacian(p):
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * p[1:-1, 1:-1]


def _ghosts(q, rows, columns):
    p = jnp.pad(q, 1)
    p = p.at[0].set(rows * p[1]).at[-1].set(rows * p[-2])
    return p.at[:, 0].set(columns * p[:, 1]).at[:, -1].set(columns * p[:, -2])


def _edges(u):
    return _laplacian(jnp.pad(u, 1, mode="edge"))


def _walls(u):
    return _laplacian(_ghosts(u, -1, 1))


def _shallow_water(u):
    h, a, b = u + 4, jnp.sin(u), jnp.cos(u)
    height, along, across = _ghosts(h, 1, 1), _ghosts(a, -1, 1), _ghosts(b, 1, -1)
    f, g = along * along / height + 4.9 * height * height, across * across / height
    f = 0.5 * (f[1:] + f[:-1]) - 0.3 * (along[1:] - along[:-1])
    g = 0.5 * (g[:, 1:] + g[:, :-1]) - 0.3 * (across[:, 1:] - across[:, :-1])
    return h - 0.1 * (f[1:, 1:-1] - f[:-1, 1:-1]) - 0.1 * (g[1:-1, 1:] - g[1:-1, :-1])


def _ends_by_index(u):
    u = u.at[jnp.array([0, -1])].set(0.0).at[:, jnp.array([0, -1])].set(0.0)
    return u.at[1:-1, 1:-1].add(u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2])


def _loop(u):
    def step(_, s):
        old, new = s
        p = jnp.pad(new, 1).at[0, 1:-1].set(new[1]).at[-1, 1:-1].set(new[-2])
        return new, 2 * new - old + 0.1 * _laplacian(p.at[1:-1, 0].set(new[:, 1]).at[1:-1, -1].set(new[:, -2]))

    return lax.fori_loop(0, 3, step, (u, 0.9 * u))[1]


def _nonlinear_loop(u):
    def step(h, _):
        p = jnp.pad(h, 1, mode="edge")
        return h + 0.1 * _laplacian(p * jnp.tanh(p)), None

    return lax.scan(step, u, None, length=3)[0]


def _checkpointed_loop(u):
    return lax.scan(
        jax.checkpoint(lambda h, _: (h + 0.1 * _laplacian(_ghosts(h * h, 1, -1)), None)), u, None, length=3
    )[0]


def _slope(function):
    return jax.grad(lambda u: jnp.sin(function(u)).sum())


def _field():
    return jnp.asarray(np.random.default_rng(0).normal(size=(N, N)), jnp.float32)


@pytest.mark.parametrize("strategy", [(8, 1), (1, 8), (2, 4)], ids=str)
@pytest.mark.parametrize("function, steps", [
    (_edges, 1), (_walls, 1), (_shallow_water, 1), (_ends_by_index, 1), (_loop, 3), (_nonlinear_loop, 3), (_checkpointed_loop, 3),
])  # fmt: skip
def test_a_gradient_sends_the_halo_of_each_way(function, steps, strategy):
    slope = _slope(function)
    sharded = shardfn.shard(slope, (strategy,), device=jax.devices())
    rows = sum(2 * n for n, shards in zip((N // strategy[1], N // strategy[0]), strategy, strict=True) if shards > 1)
    plan = sharded.plan(_field())
    ways = 3 if function is _checkpointed_loop else 2
    assert plan.cost.bytes_sent <= ways * 4 * steps * rows
    assert {one.kind for one in plan.collectives} == {"collective-permute"}
    np.testing.assert_allclose(sharded(_field()), jax.jit(slope)(_field()), 1e-4, 1e-4)


@pytest.mark.parametrize("strategy", [(8, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("function", [_shallow_water, _nonlinear_loop, _checkpointed_loop])
def test_gradients_from_outside_and_of_gradients(function, strategy):
    sharded = shardfn.shard(function, (strategy,), device=jax.devices())
    want = jax.jit(_slope(function))(_field())
    np.testing.assert_allclose(_slope(sharded)(_field()), want, 1e-4, 1e-4)
    twice, small = _slope(_slope(function)), 0.2 * _field()  # of what is large, a rounding changes the sine
    got = shardfn.shard(twice, (strategy,), device=jax.devices())(small)
    np.testing.assert_allclose(got, jax.jit(twice)(small), 1e-3, 1e-3)


def _bytes(function, size, strategy):
    x = jax.ShapeDtypeStruct((size, size), "float32")
    return shardfn.plan(function, x, in_strategy=(strategy,), device="h100:8").cost.bytes_sent


@pytest.mark.parametrize("size", [64, 512])  # of 512, an index of each element is too large to be known as an array
def test_a_grid_of_elements_stays_where_it_is(size):
    def board(u):
        return u.at[::2, ::2].set(0.0).at[1::2, 1::2].add(u[::2, ::2])

    assert [_bytes(f, size, s) for f in (board, _slope(board)) for s in ((8, 1), (2, 4))] == [0] * 4


def test_strided_rows_send_one_row_each_way():
    def relaxed(u):
        return u.at[2:-1:2].set(0.25 * (u[1:-2:2] + u[3::2]))

    assert _bytes(_slope(relaxed), 512, (8, 1)) == 4 * 4 * 512


def test_reflected_edges_send_the_halo():
    def blurred(u):
        p = jnp.pad(u, 2, mode="reflect")
        return p[4:, 2:-2] + p[:-4, 2:-2] + p[2:-2, 4:] + p[2:-2, :-4]

    plan = shardfn.plan(
        _slope(blurred), jax.ShapeDtypeStruct((512, 512), "float32"), in_strategy=((8, 1),), device="h100:8"
    )
    assert plan.cost.bytes_sent <= 14 * 4 * 512
    assert "all-gather" not in {one.kind for one in plan.collectives}


def test_a_sum_of_ghost_cells_gathers_nothing():
    def total(u):
        return jnp.tanh(jnp.pad(u, 1, mode="edge"))[1:].sum()

    plan = shardfn.plan(total, jax.ShapeDtypeStruct((N, N), "float32"), in_strategy=((8, 1),), device="h100:8")
    assert "all-gather" not in {one.kind for one in plan.collectives}
    got = shardfn.shard(total, ((8, 1),), device=jax.devices())(_field())
    np.testing.assert_allclose(got, total(_field()), 1e-5)


def test_what_a_loop_stacks_is_read_outside_too():
    def f(u):
        last, stacked = lax.scan(lambda h, _: (jnp.sin(h[::-1]), jnp.pad(h * h, 1)), u, None, length=3)
        return last + stacked[1, 2:, :-2] + stacked.sum(0)[1:-1, 1:-1]

    for g in (f, _slope(f)):
        got = shardfn.shard(g, ((2, 4),), device=jax.devices())(_field())
        np.testing.assert_allclose(got, jax.jit(g)(_field()), 1e-4, 1e-4)


def test_known_places_do_not_leave_the_loop_that_reads_them():
    places = jnp.array([0, 3, 5])

    def f(u):
        u = lax.scan(lambda h, _: (h.at[places].add(0.5 * h[places]), None), u, None, length=3)[0]
        u = lax.fori_loop(0, 3, lambda _, h: h.at[places].multiply(1.1), u)
        u = lax.cond(u.sum() > 0, lambda h: h.at[places].set(0.0), lambda h: h.at[places].set(1.0), u)
        return u.at[places].add(2.0)

    for g in (f, _slope(f)):
        got = shardfn.shard(g, ((8, 1),), device=jax.devices())(_field())
        np.testing.assert_allclose(got, jax.jit(g)(_field()), 1e-5, 1e-5)


def test_steps_on_a_wide_halo_are_traced_once_for_each_place():
    """Each step reads the one before at three places along each dimension: 40,902 equations for six steps, if none is shared."""

    def steps(u):
        p = jnp.pad(u, 6, mode="wrap")
        for _ in range(6):
            p = p[1:-1, 1:-1] + 0.1 * _laplacian(p)
        return p

    made = jax.make_jaxpr(with_shifts(steps))(_field())
    assert len(made.jaxpr.eqns) < 5000
    np.testing.assert_allclose(jax.jit(with_shifts(steps))(_field()), jax.jit(steps)(_field()), 1e-5, 1e-5)


def _coefficient(q):
    return lax.fori_loop(0, 3, lambda _, u: u.at[1:-1].add(q[1:-1] * (u[2:] + u[:-2] - 2 * u[1:-1])), jnp.ones_like(q))


def test_a_gradient_to_a_coefficient_of_a_loop_sends_the_halo_of_each_way():
    assert _bytes(_slope(_coefficient), 512, (8, 1)) == 2 * _bytes(_coefficient, 512, (8, 1)) == 2 * 3 * 2 * 4 * 512
    got = shardfn.shard(_slope(_coefficient), ((8, 1),), device=jax.devices())(_field())
    np.testing.assert_allclose(got, jax.jit(_slope(_coefficient))(_field()), 1e-4, 1e-4)


def test_stacked_fluxes_between_cells_send_the_halo():
    def f(r):
        p = jnp.pad(r, ((1, 1), (0, 0)), mode="edge")
        low, high = p[:-1], p[1:]
        fluxes = jnp.stack([low * high, low + high])
        one, other = fluxes[:, 1:] - fluxes[:, :-1]
        return r + one * other

    def g(r):
        low, high = jnp.unstack(jnp.pad(jnp.stack([r, 2 * r]), ((0, 0), (1, 1), (0, 0))))
        return low[2:] - high[:-2]

    for function in (f, g):
        assert _bytes(function, 512, (8, 1)) == 2 * 4 * 512
        got = shardfn.shard(function, ((8, 1),), device=jax.devices())(_field())
        np.testing.assert_allclose(got, jax.jit(function)(_field()), 1e-5, 1e-5)


def test_prolongation_puts_rows_where_they_are():
    def prolonged(e):
        return jnp.zeros((2 * e.shape[0], e.shape[1])).at[::2].set(e).at[1::2].set(e * e)

    assert _bytes(prolonged, 512, (8, 1)) == 0
    got = shardfn.shard(prolonged, ((8, 1),), device=jax.devices())(_field())
    np.testing.assert_array_equal(got, prolonged(_field()))


def test_a_stack_of_a_loop_inside_another_is_stacked_again():
    def f(u):
        def outer(h, _):
            return h, lax.scan(lambda g, _: (g, jnp.pad(g, 1)), h, None, length=3)[1][1:]

        return lax.scan(outer, u, None, length=2)

    for got, want in zip(jax.jit(with_shifts(f))(_field()), f(_field()), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_crop_that_a_loop_stacks_is_stacked_alone():
    def f(h):
        def step(h, _):
            t = jnp.sin(jnp.pad(h, 1)[2:, 2:])
            return 0.5 * h, t[:33, :33]

        return lax.scan(step, h, None, length=3)[1]

    sizes = [v.aval.size for eqn in jax.make_jaxpr(with_shifts(f))(_field()).jaxpr.eqns for v in eqn.outvars]
    assert max(sizes) <= 3 * 33 * 33 + 64 * 64


def test_shared_operands_of_a_row_are_squeezed_once():
    def f(u):
        p = u[0:1]
        for _ in range(12):
            p = p * (1 - p) + jnp.sin(p)
        return u + jnp.squeeze(p, 0)

    assert len(jax.make_jaxpr(with_shifts(f))(_field()).jaxpr.eqns) < 100


def test_one_array_that_is_broadcast_in_two_ways_is_transposed_in_both():
    def f(v):
        return jnp.transpose((v[:, :, :, None] + v[:, :, None, :])[1:], (2, 1, 0, 3))

    v = jnp.arange(8.0).reshape(2, 2, 2)
    np.testing.assert_array_equal(with_shifts(f)(v), f(v))


def test_a_product_that_is_put_in_strided_rows_has_a_finite_gradient_beside_what_is_not():
    x = jnp.arange(1.0, 9.0).at[1].set(jnp.inf)

    def f(y):
        out = with_shifts(lambda x, y: x.at[::2].multiply(y, unique_indices=True))(x, y)
        return jnp.where(jnp.isfinite(out), out, 0).sum()

    np.testing.assert_array_equal(jax.grad(f)(jnp.arange(1.0, 5.0)), [1.0, 3.0, 5.0, 7.0])


def _gas(u):
    """Two steps of a compressible gas: stacked components, fluxes that are chosen by wave speeds, and ghost cells."""

    def flux(q, d):
        density, along, across, energy = q
        speed = q[1 + d] / density
        pressure = 0.4 * (energy - 0.5 * (along**2 + across**2) / density)
        found = [q[1 + d], along * speed, across * speed, (energy + pressure) * speed]
        found[1 + d] = found[1 + d] + pressure
        return jnp.stack(found), speed, jnp.sqrt(1.4 * pressure / density)

    def step(q, _):
        change = 0
        for d, dim in ((0, 1), (1, 2)):
            n = q.shape[dim]
            ends = (lax.slice_in_dim(q, i, i + 1, axis=dim) for i in (0, n - 1))
            padded = jnp.concatenate([next(ends), q, next(ends)], dim)
            left, right = (lax.slice_in_dim(padded, i, i + n + 1, axis=dim) for i in (0, 1))
            (f, u, c), (g, v, k) = flux(left, d), flux(right, d)
            low, high = jnp.minimum(u - c, v - k), jnp.maximum(u + c, v + k)
            between = (high * f - low * g + low * high * (right - left)) / (high - low)
            change += jnp.diff(jnp.where(low > 0, f, jnp.where(high < 0, g, between)), axis=dim)
        return q - 0.05 * change, None

    q = jnp.stack([u + 3, 0.1 * u, jnp.full_like(u, 0.2), u + 6])
    return lax.scan(step, q, None, length=2)[0]


def _sweeps(u):
    """The same with one sweep behind the other, of which the second reads what the first has made."""

    def flux(q, d):
        density, along, across = q[0], q[1] / q[0], q[2] / q[0]
        pressure = 0.4 * (q[3] - 0.5 * density * (along**2 + across**2))
        v, own = (along, across)[d], [0 * pressure] * 2
        own[d] = pressure
        found = [density * v, density * along * v + own[0], density * across * v + own[1], (q[3] + pressure) * v]
        return jnp.stack(found), v, jnp.sqrt(1.4 * pressure / density)

    def step(q, _):
        for d, dim in ((0, 1), (1, 2)):
            padded = jnp.pad(q, [(int(i == dim),) * 2 for i in range(3)], mode="edge")
            n = padded.shape[dim] - 1
            left, right = (lax.slice_in_dim(padded, i, i + n, axis=dim) for i in (0, 1))
            (f, v, c), (g, w, k) = flux(left, d), flux(right, d)
            low = jnp.minimum(jnp.minimum(v - c, w - k), 0.0)
            high = jnp.maximum(jnp.maximum(v + c, w + k), 0.0)
            between = (high * f - low * g + low * high * (right - left)) / (high - low + 1e-9)
            q = q - 0.05 * jnp.diff(between, axis=dim)
        return q, None

    q = jnp.stack([0.1 * u + 1, 0.1 * u, jnp.full_like(u, 0.1), 0.1 * u + 2.5])
    return lax.scan(step, q, None, length=2)[0]


def _count(jaxpr, name):
    return sum((eqn.primitive.name == name) + sum(_count(each, name) for each in inner(eqn)) for eqn in jaxpr.eqns)


@pytest.mark.parametrize("gas", [_gas, _sweeps])
def test_components_of_a_state_are_computed_once(gas):
    made = jax.make_jaxpr(with_shifts(gas))(_field())
    assert _count(made.jaxpr, "sqrt") == 4  # left and right, along two dimensions
    slope = jax.make_jaxpr(with_shifts(_slope(gas)))(_field())
    assert _count(slope.jaxpr, "sqrt") <= 12


@pytest.mark.parametrize("strategy, halos", [((8, 1), 13), ((1, 8), 13), ((2, 4), 15)], ids=str)
@pytest.mark.parametrize("gas", [_gas, _sweeps])
def test_the_gradient_of_a_gas_sends_a_few_halos(gas, strategy, halos):
    """What is computed outside of a loop of what it stacked is stacked as the arrays that it is made of."""
    slope = _slope(gas)
    sharded = shardfn.shard(slope, (strategy,), device=jax.devices())
    plan = sharded.plan(_field())
    rows = sum(2 * n for n, shards in zip((N // strategy[1], N // strategy[0]), strategy, strict=True) if shards > 1)
    assert plan.cost.bytes_sent <= halos * rows * 4 * 4 * 2  # components, bytes, steps
    assert "all-to-all" not in {one.kind for one in plan.collectives}
    np.testing.assert_allclose(sharded(_field()), jax.jit(slope)(_field()), 1e-3, 1e-3)


@pytest.mark.parametrize("gas", [_gas, _sweeps])
def test_a_gas_sends_its_halo(gas):
    """The fluxes are computed of the neighbours' components."""
    plan = shardfn.shard(gas, ((8, 1),), device=jax.devices()).plan(_field())
    assert plan.cost.bytes_sent == 2 * N * 4 * 4 * 2  # both ways, components, bytes, steps


def test_values_that_settle_while_others_are_stacked_keep_their_places():
    def rows_and_rotated(x):
        def step(h, _):
            h = h.at[6].set(2 * h[9]) * 0.7
            y = 1.5 * h + 0.1
            return h, (y, jnp.roll(y, 3))

        return lax.scan(step, x, None, length=4)[1]

    x = jnp.cos(jnp.arange(15.0))
    for got, want in zip(with_shifts(rows_and_rotated)(x), rows_and_rotated(x), strict=True):
        np.testing.assert_allclose(got, want, 1e-6)


@pytest.mark.parametrize("reduced", [
    lambda z: z.sum(0), lambda z: jnp.roll(z.sum(0), 1), lambda z: jnp.diff(z.max(0)), lambda z: z.min(), lambda z: z.sum(1),
])  # fmt: skip
def test_ghost_cells_along_a_dimension_that_stays_and_one_that_is_reduced(reduced):
    def function(x, y):
        ends = jnp.pad(y, ((1, 1), (0, 0)), mode="edge")
        return reduced(jnp.concatenate([ends, x[2:-2], ends], 1))

    x, y = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((20, 32), (14, 1))))
    np.testing.assert_allclose(with_shifts(function)(x, y), function(x, y), 1e-5, 1e-5)


def test_a_product_beside_what_is_not_finite_has_a_finite_gradient():
    x = jnp.ones((8, 8)).at[:, 0].set(jnp.inf)

    def function(x):
        return jnp.prod(jnp.pad(x[:, 1:], ((1, 1), (0, 0)), mode="edge"), axis=0).sum()

    np.testing.assert_array_equal(jax.grad(with_shifts(function))(x), jax.grad(function)(x))


@pytest.mark.parametrize("width, most", [(3, 200), (8, 500)])
def test_ends_along_several_dimensions_are_reduced_in_a_few_ops(width, most):
    made = jax.make_jaxpr(with_shifts(lambda x: jnp.max(jnp.pad(x, width, mode="wrap") ** 2)))(jnp.ones((16, 16, 16)))
    assert len(made.eqns) < most


@pytest.mark.parametrize("columns", [8, 64])
def test_a_tree_of_halves_is_computed_once(columns):
    """JAX writes the derivative of a product as a tree of products of halves."""

    def slope(x):
        return jax.grad(lambda x: jnp.sin(jax.grad(lambda x: jnp.sin(jnp.prod(x)))(x)).sum())(x)

    x = 1 + jnp.arange(24.0 * columns).reshape(24, columns) / (24**2 * columns**2)
    written, made = (jax.make_jaxpr(one)(x).jaxpr for one in (slope, with_shifts(slope)))
    assert len(list(equations(made))) < 12 * len(list(equations(written)))
    np.testing.assert_allclose(with_shifts(slope)(x), jax.jit(slope)(x), 2e-4, 1e-5)


@pytest.mark.parametrize("strategy", [(8, 1), (4, 2), (2, 4)])
def test_a_tree_of_halves_is_gathered_where_shifts_send_more(strategy):
    """A derivative of a tree reads each row at many distances: its shifts are no halos."""

    def tree(x):
        while len(x) > 1:
            x = x[: len(x) // 2] * x[len(x) // 2 :]
        return x.sum()

    def slope(x):
        return jax.grad(lambda x: jnp.sum(jax.grad(tree)(x) ** 2))(x)

    x = 1 + jax.random.uniform(jax.random.key(0), (64, 8)) / 8
    sharded = shardfn.shard(slope, (strategy,))
    plan = sharded.plan(x)
    assert sum(c.total_bytes for c in compile_plan(plan).collectives) == plan.cost.bytes_sent < 3 * x.nbytes
    np.testing.assert_allclose(sharded(x), slope(x), 2e-4, 1e-5)


def test_a_scan_by_doubling_is_gathered_where_shifts_send_more(tmp_path):
    """XLA alone would send more for the program as it is written than with workarounds. Its layout file gives the same plan."""

    def slope(x):
        for by in (1, 2, 4, 8, 16, 32):
            x = x.at[by:].max(x[:-by])
        return jnp.sin(x).sum()

    x = jax.random.uniform(jax.random.key(0), (64, 8))
    plan = shardfn.shard(jax.grad(slope), ((4, 1),)).plan(x)
    assert plan.cost.bytes_sent <= x.nbytes
    plan.save(tmp_path / "plan.toml")
    again = shardfn.shard(jax.grad(slope), layout=tmp_path / "plan.toml")
    assert again.plan(x).collectives == plan.collectives
    np.testing.assert_allclose(again(x), jax.grad(slope)(x), 1e-5, 1e-5)
