"""A convolution of a sharded image is that of the unsharded one, in value and in both gradients; what is out of reach is refused."""

import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax
from jax.sharding import NamedSharding

import shardfn
from shardfn import halo
from shardfn.errors import StrategyError, StrategyTypeError
from shardfn.mindspore import Layout

LAYOUT = Layout((2, 4), ("a", "b"))
NHWC = ("NHWC", "HWIO", "NHWC")
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


X, K = normal(2, 16, 24, 4), normal(3, 3, 4, 8)


def unsharded(x, k, strides=(1, 1), padding="SAME", inner=(1, 1), outer=(1, 1), numbers=NHWC, **more):
    """The same convolution, unsharded. Zeros and negative padding are inserted first, because XLA on CPU miscomputes the latter."""
    if not isinstance(padding, str):
        spatial = lax.conv_dimension_numbers(x.shape, k.shape, numbers).lhs_spec[2:]
        config = [(0, 0, 0)] * x.ndim
        for dim, (low, high), between in zip(spatial, padding, inner, strict=True):
            config[dim] = (low, high, between - 1)
        x, padding, inner = lax.pad(x, jnp.zeros((), x.dtype), config), "VALID", (1, 1)
    return lax.conv_general_dilated(x, k, strides, padding, inner, outer, numbers, **more)


def check(sharded, reference, x=X, k=K, grads=True):
    reference = jax.jit(reference)
    want = reference(x, k)
    got = sharded(x, k)
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    if not grads:
        return got.sharding.shard_shape(got.shape)
    weights = normal(*want.shape)
    mine, theirs = (jax.grad(lambda x, k, f=f: (f(x, k) * weights).sum(), (0, 1))(x, k) for f in (sharded, reference))
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    return got.sharding.shard_shape(got.shape)


PADDINGS = ["SAME", "VALID", ((2, 1), (0, 3)), ((-1, 1), (4, 0))]
STEPS = [((1, 1), (1, 1), (1, 1)), ((2, 2), (1, 1), (1, 1)), ((2, 3), (1, 1), (2, 1)), ((1, 2), (2, 3), (1, 1))]
SHARDINGS = [("None", "a", "b", "None"), ("a", "None", "b", "None"), ("None", ("a", "b"), "None", "None")]
CASES = [
    (sharded, padding, steps)
    for sharded, padding, steps in itertools.product(SHARDINGS, PADDINGS, STEPS)
    if not (isinstance(padding, str) and steps[1] != (1, 1))  # lax refuses a word beside zeros in the image
]


def one(case):
    sharded, padding, (strides, inner, outer) = case
    layout = LAYOUT(*sharded)

    def sharded_conv(x, k):
        return halo.conv(x, k, strides, padding, inner, outer, NHWC, layout=layout)

    spans = [(3 - 1) * d + 1 for d in outer]
    pads = lax.padtype_to_pads((16, 24), spans, strides, padding) if isinstance(padding, str) else padding
    reach = [
        halo.halo_of(X.shape[dim], layout.strategy[dim], 3, strides[i], pads[i], outer[i], inner[i])
        for i, dim in enumerate((1, 2))
        if layout.strategy[dim] > 1
    ]
    if any(isinstance(found, str) for found in reach):
        with pytest.raises(StrategyError, match="its neighbour has"):
            sharded_conv(X, K)
        return
    check(sharded_conv, lambda x, k: unsharded(x, k, strides, padding, inner, outer))


@pytest.mark.parametrize("case", CASES[:: len(CASES) // 7], ids=str)
def test_some_convolutions_are_those_of_the_unsharded_image(case):
    one(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_convolutions_are_those_of_the_unsharded_image(case):
    one(case)


def rows_by_halo(x, shards, window, stride, padding, outer, inner):
    """The convolution of a vector with ones at dilated places, shard by shard, as `halo_of` says, in NumPy."""
    found = halo.halo_of(len(x), shards, window, stride, padding, outer, inner)
    if isinstance(found, str):
        return found
    size, made = len(x) // shards, []
    for p in range(shards):
        # Only the neighbours' rows; what is beyond them is 1e9, and must never be looked at but past the ends.
        at = np.arange(p * size - found.before, (p + 1) * size + found.after)
        near = (at >= (p - 1) * size) & (at < (p + 2) * size)
        inside = (at >= 0) & (at < len(x))
        rows = np.where(inside & near, x[np.clip(at, 0, len(x) - 1)], np.where(inside, 1e9, 0.0))
        dilated = np.zeros(len(rows) * inner)
        dilated[::inner] = rows
        mine = dilated[found.starts[p] : found.starts[p] + found.length]
        assert len(mine) == found.length
        made += [mine[i * stride : i * stride + (window - 1) * outer + 1 : outer].sum() for i in range(found.shard_out)]
    return np.array(made[: found.size_out])


@given(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4),
    st.tuples(st.integers(-2, 6), st.integers(-2, 6)), st.integers(1, 3), st.integers(1, 3),
)  # fmt: skip
def test_halo_of_is_exact_or_says_why(size, shards, window, stride, padding, outer, inner):
    x = np.arange(1.0, size * shards + 1)
    span, length = (window - 1) * outer + 1, (len(x) - 1) * inner + 1
    row = np.zeros(length)
    row[::inner] = x
    row = np.pad(row, [max(0, p) for p in padding])[
        max(0, -padding[0]) : len(row) + sum(max(0, p) for p in padding) + min(0, padding[1])
    ]
    want = [row[i : i + span : outer].sum() for i in range(0, len(row) - span + 1, stride)]
    got = rows_by_halo(x, shards, window, stride, padding, outer, inner)
    if isinstance(got, str):
        assert "no window" in got if not want else "neighbour" in got
        assert not want or shards > 1
    else:
        np.testing.assert_allclose(got, want)


@pytest.mark.parametrize(
    ("rows", "beyond"), [(4, False), (5, True), (8, True)], ids=["all of the neighbour", "one more", "two neighbours"]
)
def test_a_border_of_the_whole_neighbour_is_fetched_and_not_more(rows, beyond):
    found = halo.halo_of(16, 4, 2 * rows + 1, padding=(rows, rows))
    assert isinstance(found, str) == beyond


@pytest.mark.slow
def test_layouts_of_the_result_channels_and_groups():
    layout = LAYOUT("None", "a", "None", "None")
    y = check(lambda x, k: halo.conv(x, k, (2, 1), "SAME", dimension_numbers=NHWC, layout=layout,
                                     kernel_layout=LAYOUT("None", "None", "None", "b")),
              lambda x, k: unsharded(x, k, (2, 1)))  # fmt: skip
    assert y == (2, 4, 24, 2)
    channels = LAYOUT("None", "a", "None", "b")
    y = check(lambda x, k: halo.conv(x, k, (1, 1), "SAME", dimension_numbers=NHWC, layout=channels), unsharded)
    assert y == (2, 8, 24, 8)
    depthwise = normal(3, 3, 1, 8)
    y = check(lambda x, k: halo.conv(x, k, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=4, layout=channels),
              lambda x, k: unsharded(x, k, feature_group_count=4), k=depthwise)  # fmt: skip
    assert y == (2, 8, 24, 2)
    check(lambda x, k: halo.conv(x, k, (1, 1), "SAME", dimension_numbers=NHWC, batch_group_count=2, layout=layout),
          lambda x, k: unsharded(x, k, batch_group_count=2), grads=False)  # fmt: skip


@pytest.mark.parametrize("kind", ["feature", "batch"])
@pytest.mark.parametrize(
    ("groups", "axes"), [(2, "b"), (4, "a"), (4, "b"), (8, "b"), (2, ("a", "b")), (8, ("b", "a"))], ids=str
)
def test_outputs_cut_under_groups_are_made_of_their_own_groups(kind, groups, axes):
    """As many groups as shards, more of them, and fewer; the order of two axes too."""
    x = normal(2, 8, 6, 8) if kind == "feature" else normal(8, 8, 6, 3)
    k, more = normal(3, 3, x.shape[3] // groups if kind == "feature" else 3, 16), {f"{kind}_group_count": groups}
    rest = "b" if axes == "a" else "a" if axes == "b" else "None"
    layout, kernel = LAYOUT("None", rest, "None", "None"), LAYOUT("None", "None", "None", axes)
    y = check(lambda x, k: halo.conv(x, k, (1, 2), "SAME", dimension_numbers=NHWC, layout=layout, kernel_layout=kernel, **more),
              lambda x, k: unsharded(x, k, (1, 2), **more), x, k)  # fmt: skip
    assert y == (2 if kind == "feature" else 8 // groups, 8 // layout.strategy[1], 3, 16 // kernel.strategy[3])


def test_batch_groups_beside_summed_channels():
    layout, kernel = LAYOUT("None", "None", "None", "a"), LAYOUT("None", "None", "None", "b")
    check(lambda x, k: halo.conv(x, k, (1, 1), "SAME", dimension_numbers=NHWC, batch_group_count=2, layout=layout, kernel_layout=kernel),
          lambda x, k: unsharded(x, k, batch_group_count=2))  # fmt: skip


def test_nchw_one_and_three_spatial_dims_and_a_named_sharding():
    x, k = normal(1, 2, 16, 8), normal(4, 2, 3, 3)
    layout = LAYOUT("None", "None", "b", "a")
    check(
        lambda x, k: halo.conv(x, k, (1, 1), "SAME", layout=layout),
        lambda x, k: unsharded(x, k, numbers=None),
        x,
        k,
        grads=False,
    )
    here = jax.device_put(x, layout.sharding())
    y = halo.conv(here, k, (1, 1), "SAME", layout=here.sharding)
    assert isinstance(y.sharding, NamedSharding) and y.sharding.shard_shape(y.shape) == (1, 4, 4, 4)
    line, kernel = normal(2, 3, 32), normal(5, 3, 4)
    check(lambda x, k: halo.conv(x, k, (1,), "SAME", layout=LAYOUT("a", "None", "b")),
          lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME"), line, kernel, grads=False)  # fmt: skip
    cube, kernel = normal(1, 1, 8, 8, 8), normal(2, 1, 3, 3, 3)
    check(lambda x, k: halo.conv(x, k, (1, 1, 1), "SAME", layout=LAYOUT("None", "None", "a", "b", "None")),
          lambda x, k: lax.conv_general_dilated(x, k, (1, 1, 1), "SAME"), cube, kernel, grads=False)  # fmt: skip


def test_only_neighbours_talk():
    layout = LAYOUT("None", "a", "b", "None")
    run = jax.jit(lambda x, k: halo.conv(x, k, (1, 1), "SAME", dimension_numbers=NHWC, layout=layout))
    text = run.lower(jax.device_put(X, layout.sharding()), K).compile().as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text and "all-to-all" not in text


def test_conv_of_an_equal_call_is_not_traced_again():
    layout, traced = LAYOUT("None", "a", "b", "None"), []
    first = halo.conv(X, K, (1, 1), "SAME", dimension_numbers=NHWC, layout=layout)
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: traced.append(event))
    second = halo.conv(X, K, (1, 1), "SAME", dimension_numbers=NHWC, layout=layout)
    assert not [event for event in traced if "trace" in event]
    np.testing.assert_array_equal(first, second)


def test_a_sharded_training_step_with_it_inside():
    layout = LAYOUT("None", "a", "b", "None")

    def loss(kernels, x, conv):
        for kernel, stride in zip(kernels, (1, 2), strict=True):
            x = jax.nn.relu(conv(x, kernel, (stride, stride)))
        return (x**2).mean()

    def by_halo(x, k, strides):
        return halo.conv(x, k, strides, "SAME", dimension_numbers=NHWC, layout=layout)

    def step(conv):
        return lambda kernels, x: jax.tree.map(lambda p, g: p - g, kernels, jax.grad(loss)(kernels, x, conv))

    kernels = [K, normal(3, 3, 8, 4)]
    want = jax.jit(step(unsharded))(kernels, X)
    sharded = shardfn.shard(step(by_halo), (LAYOUT("None", "None", "None", "None"), layout))
    for mine, theirs in zip(sharded(kernels, X), want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    assert not [f for f in sharded.plan(kernels, X).diagnostics if "shardfn gathers" in f]


@pytest.mark.parametrize(
    ("kind", "match", "call"),
    [
        (StrategyError, "dim 1 of the image cannot be sharded 2 ways", lambda: halo.conv(X[:, :15], K, (1, 1), "SAME", dimension_numbers=NHWC, layout=LAYOUT("None", "a", "None", "None"))),
        (StrategyError, "shard 0 needs 4 rows after its own, and its neighbour has 2", lambda: halo.conv(X, normal(9, 3, 4, 8), (1, 1), "SAME", dimension_numbers=NHWC, layout=LAYOUT("None", ("a", "b"), "None", "None"))),
        (StrategyError, "cannot be sharded 4 ways with 2 groups", lambda: halo.conv(X, normal(3, 3, 2, 8), (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=2, layout=LAYOUT("None", "a", "None", "b"))),
        (StrategyError, "batch_group_count = 2", lambda: halo.conv(X, K, (1, 1), "SAME", dimension_numbers=NHWC, batch_group_count=2, layout=LAYOUT("a", "None", "b", "None"))),
        (StrategyError, "cannot be sharded 4 ways with feature_group_count = 6", lambda: halo.conv(normal(2, 8, 8, 6), normal(3, 3, 1, 12), (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=6, layout=LAYOUT("None", "a", "None", "None"), kernel_layout=LAYOUT("None", "None", "None", "b"))),
        (StrategyError, "output channels cannot be sharded 4 ways", lambda: halo.conv(X, normal(3, 3, 4, 6), (1, 1), "SAME", dimension_numbers=NHWC, layout=LAYOUT("None", "a", "None", "None"), kernel_layout=LAYOUT("None", "None", "None", "b"))),
        (StrategyError, "dim 3 of the image cannot be split into feature_group_count = 8 groups", lambda: halo.conv(X, normal(3, 3, 1, 8), (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=8, layout=LAYOUT("None", "a", "None", "None"), kernel_layout=LAYOUT("None", "None", "None", "b"))),
        (StrategyError, "both sharded over b", lambda: halo.conv(X, K, (1, 1), "SAME", dimension_numbers=NHWC, layout=LAYOUT("None", "a", "b", "None"), kernel_layout=LAYOUT("None", "None", "None", "b"))),
        (StrategyError, "no meaning with zeros", lambda: halo.conv(X, K, (1, 1), "SAME", (2, 2), dimension_numbers=NHWC, layout=LAYOUT("None", "a", "b", "None"))),
        (StrategyTypeError, "must be a Layout", lambda: halo.conv(X, K, (1, 1), "SAME", layout=(1, 2, 4, 1))),
        (StrategyTypeError, "`layout` has 3 dims", lambda: halo.conv(X, K, (1, 1), "SAME", layout=LAYOUT("a", "b", "None"))),
        (StrategyTypeError, "on different meshes", lambda: halo.conv(X, K, (1, 1), "SAME", layout=LAYOUT("a", "b", "None", "None"), kernel_layout=Layout((8,), ("c",))("None", "None", "None", "None"))),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(kind, match, call):
    with pytest.raises(kind, match=match) as caught:
        call()
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("match", "more"),
    [
        ("`window_strides` must be 2 ints", {"window_strides": (1,)}),
        ("`window_strides` must be 2 ints", {"window_strides": (0, 1)}),
        ("`window_strides` must be 2 ints", {"window_strides": 2}),
        ("`lhs_dilation` must be 2 ints", {"lhs_dilation": (1, 0), "padding": [(1, 1), (1, 1)]}),
        ("`rhs_dilation` must be 2 ints", {"rhs_dilation": (1, 1, 1)}),
        ("`padding` must be 2 pairs", {"padding": [(1, 1)]}),
        ("`padding` must be 2 pairs", {"padding": [1, 1]}),
        ("`padding` must be 2 pairs", {"padding": None}),
        ("an unknown word", {"padding": "WIDE"}),
        ("(?s)2 problems.*window_strides.*padding", {"window_strides": (1,), "padding": [(1, 1)]}),
    ],
)
def test_windows_that_do_not_fit_the_spatial_dims_are_refused(match, more):
    asked = {"window_strides": (1, 1), "padding": "SAME", **more}
    with pytest.raises(StrategyError, match=match) as caught:
        halo.conv(X, K, dimension_numbers=NHWC, layout=LAYOUT("None", "a", "None", "None"), **asked)
    assert "fix:" in str(caught.value)
