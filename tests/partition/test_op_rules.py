"""What the flow says is sent, for single ops, beside what XLA compiles; layouts to layouts; windows."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardfn
from shardfn import compiled
from shardfn.cost.estimate import collectives
from shardfn.ir import shardy
from shardfn.ir.model import OpConstraint, WindowDim
from shardfn.ir.windows import halo_extent
from shardfn.partition.halo_exchange import halo_permutes
from shardfn.partition.partitioner import insert_collectives
from shardfn.partition.resharding import joined_axes, resharding_steps, split_axes


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def conv(x, k):
    return lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def halves(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")


def thirds(x):
    return lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME")


def looped(x, w):
    return lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)


def swapped(a, b):
    """What one round reads is another value in the next, though the loop hands it on as it is."""
    return lax.fori_loop(0, 5, lambda _, c: (c[1] @ c[0], c[0]), (a, b))


def settled(x):
    """A loop whose condition communicates."""
    return lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, x)


def of_each_layer(ws, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def loop_in_a_loop(x, w):
    """Of the outer loop nobody knows how often it runs; what only the inner one reads is resharded before it."""

    def inner(i, x):
        return jnp.tanh(x @ w)

    def outer(carried):
        i, x = carried
        return i + 1, lax.fori_loop(0, 6, inner, x)

    return lax.while_loop(lambda carried: carried[1][0, 0] < carried[0], outer, (0, x))[1]


def first_of_two(x, w):
    return lax.cond(x[0, 0] > 0, lambda: (x @ w, x.sum(0)), lambda: (x @ w.T, x.max(0)))[0]


def batched_rows(tables, indices):
    return jax.vmap(lambda table, i: table[i])(tables, indices)


def batched_update(tables, indices, updates):
    return jax.vmap(lambda table, i, update: table.at[i].set(update))(tables, indices, updates)


# name: function, arguments, in_strategy, out_strategy
OPS = {
    "transpose": (jnp.transpose, (f32(16, 24),), ((8, 1),), ((8, 1),)),
    "reshape that splits": (lambda x: x.reshape(8, 4, 3), (f32(32, 3),), ((8, 1),), ((8, 1, 1),)),
    "reshape that merges": (lambda x: x.reshape(32, 3), (f32(8, 4, 3),), ((8, 1, 1),), ((8, 1),)),
    "reshape over a minor dim": (lambda x: x.reshape(64), (f32(8, 8),), ((1, 8),), ((8,),)),
    "broadcast": (lambda x: x[:, None] + jnp.zeros((16, 8)), (f32(16),), ((8,),), ((1, 8),)),
    "sum of one dim": (lambda x: x.sum(0), (f32(16, 24),), ((8, 1),), None),
    "sum of two sharded dims": (jnp.sum, (f32(16, 24),), ((2, 4),), None),
    "sum to shards": (lambda x: x.sum(0), (f32(16, 24),), ((8, 1),), ((8,),)),
    "maximum": (lambda x: x.max(1), (f32(16, 24),), ((1, 8),), None),
    "argmax": (lambda x: jnp.argmax(x, 1), (f32(16, 24),), ((1, 8),), None),
    "rows of a table": (lambda t, i: t[i], (f32(64, 16), i32(4)), ((8, 1), (1,)), None),
    "columns of a table": (lambda t, i: t[i], (f32(64, 16), i32(4)), ((1, 8), (1,)), None),
    "a sharded index": (lambda t, i: t[i], (f32(64, 16), i32(64)), ((1, 1), (8,)), None),
    "a small table and a sharded index": (lambda t, i: t[i], (f32(16, 4), i32(64)), ((8, 1), (8,)), None),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, 1), (f32(16, 8), i32(16, 1)), ((8, 1), (8, 1)), None),
    "scatter to sharded rows": (lambda t, i, u: t.at[i].add(u), (f32(64, 16), i32(4), f32(4, 16)),
                            ((8, 1), (1,), (1, 1)), ((8, 1),)),
    "scatter of sharded updates": (lambda t, i, u: t.at[i].add(u), (f32(16, 16), i32(64), f32(64, 16)),
                               ((1, 1), (8,), (8, 1)), ((1, 1),)),
    "scatter of sharded updates that replace": (lambda t, i, u: t.at[i].set(u), (f32(16, 16), i32(64), f32(64, 16)),
                                            ((1, 1), (8,), (8, 1)), ((1, 1),)),
    "scatter of the largest": (lambda t, i, u: t.at[i].max(u), (f32(16, 16), i32(64), f32(64, 16)),
                               ((1, 1), (8,), (8, 1)), ((1, 1),)),
    "scatter that replaces sharded rows": (lambda t, i, u: t.at[i].set(u), (f32(16, 16), i32(64), f32(64, 16)),
                                       ((2, 1), (4,), (4, 1)), ((2, 1),)),
    "rows of a batch of tables": (batched_rows, (f32(16, 8, 8), i32(16)), ((1, 1, 8), (8,)), ((8, 1),)),
    "rows of a batch of tables, sharded by rows": (batched_rows, (f32(16, 8, 8), i32(16)), ((2, 4, 1), (8,)), ((8, 1),)),
    "rows of a batch of tables, by an idle axis": (batched_rows, (f32(16, 8, 8), i32(16)), ((4, 1, 1), (8,)), ((8, 1),)),
    "scatter to a batch of tables": (batched_update, (f32(16, 8, 8), i32(16), f32(16, 8)), ((1, 1, 8), (8,), (8, 1)), ((1, 1, 8),)),
    "scatter to a batch of tables, sharded by rows": (batched_update, (f32(16, 8, 8), i32(16), f32(16, 8)),
                                                      ((1, 8, 1), (4,), (4, 1)), ((1, 8, 1),)),
    "slice": (lambda x: x[3:51], (f32(64, 4),), ((8, 1),), ((8, 1),)),
    "slice along an unsharded dim": (lambda x: x[:, 1:3], (f32(64, 4),), ((8, 1),), ((8, 1),)),
    "pad": (lambda x: jnp.pad(x, ((1, 7), (0, 0))), (f32(64, 4),), ((8, 1),), ((8, 1),)),
    "slice of a sharded line to an unsharded one": (lambda x: x[:40], (f32(64, 4),), ((8, 1),), ((1, 1),)),
    "slice of a half": (lambda x: x[32:], (f32(64, 8),), ((8, 1),), ((2, 4),)),
    "pad of an unsharded line": (lambda x: jnp.pad(x, ((30, 34), (0, 0))), (f32(64, 16),), ((1, 8),), ((2, 4),)),
    "pad of a line whose columns are sharded": (lambda x: jnp.pad(x, ((1, 7), (0, 0))), (f32(64, 16),), ((1, 4),), ((2, 4),)),
    "pad of few elements to many": (lambda x: jnp.pad(x[:, :1], ((0, 0), (0, 1023))), (f32(64, 1024),), ((4, 2),), ((4, 2),)),
    "product of equal shardings": (lambda x, y: x * y, (f32(64, 16), f32(64, 16)), ((8, 1), (8, 1)), ((1, 8),)),
    "sum of replicated arrays": (lambda x, y: x + y, (f32(64, 16), f32(64, 16)), ((1, 1), (1, 1)), ((8, 1),)),
    "roll": (lambda x: jnp.roll(x, 3, 0), (f32(64, 4),), ((8, 1),), ((8, 1),)),
    "roll the other way": (lambda x: jnp.roll(x, -2, 0), (f32(64, 4),), ((8, 1),), ((8, 1),)),
    "reverse": (lambda x: x[::-1], (f32(64, 4),), ((8, 1),), ((8, 1),)),
    "concatenate along it": (lambda x, y: jnp.concatenate([x, y]), (f32(32, 8), f32(32, 8)),
                             ((8, 1), (8, 1)), ((8, 1),)),
    "concatenate beside it": (lambda x, y: jnp.concatenate([x, y], 1), (f32(32, 8), f32(32, 8)),
                              ((8, 1), (8, 1)), ((8, 1),)),
    "concatenate along it where no other dim divides": (
        lambda x, y: jnp.concatenate([x, y]), (f32(4, 6, 5), f32(4, 6, 5)), ((4, 2, 1), (4, 2, 1)), ((4, 2, 1),)),
    "pool of an unsharded line": (thirds, (f32(64, 16),), ((1, 4),), ((2, 4),)),
    "pool without overlap": (halves, (f32(64, 4),), ((8, 1),), ((8, 1),)),
    "pool with overlap": (thirds, (f32(64, 4),), ((8, 1),), ((8, 1),)),
    "convolution of batches": (conv, (f32(8, 16, 4), f32(3, 4, 8)), ((8, 1, 1), (1, 1, 1)), None),
    "convolution of a sharded line": (conv, (f32(2, 64, 4), f32(3, 4, 8)), ((1, 8, 1), (1, 1, 1)), None),
    "convolution to sharded channels": (conv, (f32(2, 16, 4), f32(3, 4, 8)), ((1, 1, 1), (1, 1, 8)), None),
    "convolution of sharded channels": (conv, (f32(2, 16, 8), f32(3, 8, 4)), ((1, 1, 8), (1, 8, 1)), None),
    "sort along it": (lambda x: jnp.sort(x, 0), (f32(64, 8),), ((8, 1),), ((8, 1),)),
    "sort along it where no other dim divides": (lambda x: jnp.sort(x, 0), (f32(4, 6, 5),), ((4, 2, 1),), ((4, 2, 1),)),
    "cumulative sum along it": (lambda x: jnp.cumsum(x, 0), (f32(64, 8),), ((8, 1),), ((8, 1),)),
    "largest of each row": (lambda x: lax.top_k(x, 2), (f32(64, 8),), ((8, 1),), None),
    "one row written": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (f32(64, 8), f32(1, 8), i32()),
                        ((8, 1), (1, 1), ()), ((8, 1),)),
    "rows written across shards": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (f32(64, 8), f32(4, 8), i32()),
                                   ((2, 4), (1, 1), ()), ((8, 1),)),
    "parts of both dims written": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), (f32(64, 16), f32(1, 8), i32()),
                                   ((2, 4), (1, 1), ()), ((2, 4),)),
    "one row read": (lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 8)), (f32(64, 8), i32()), ((8, 1), ()), None),
    "sum of bfloat16": (jnp.matmul, (bf16(8, 64), bf16(64, 8)), ((1, 8), (8, 1)), None),
    "batched product": (jnp.matmul, (f32(8, 4, 6), f32(8, 6, 4)), ((8, 1, 1), (8, 1, 1)), None),
    "product to rows": (jnp.matmul, (f32(64, 64), f32(64, 8)), ((1, 8), (8, 1)), ((8, 1),)),
    "product with a sharded weight": (jnp.matmul, (f32(64, 64), f32(64, 8)), ((8, 1), (8, 1)), ((8, 1),)),
    "product of few rows": (jnp.matmul, (f32(8, 512), f32(512, 512)), ((1, 1), (8, 1)), ((1, 1),)),
    "erf": (jax.scipy.special.erf, (f32(64, 4),), ((8, 1),), None),
    "a value used twice": (lambda x, w: (x @ w) + (x @ w[::-1]), (f32(64, 8), f32(8, 16)), ((8, 1), (1, 8)), None),
    "a loop's invariant": (looped, (f32(16, 8), f32(8, 8)), ((8, 1), (8, 1)), None),
    "carried values that change places": (swapped, (f32(16, 16), f32(16, 16)), ((8, 1), (8, 1)), None),
    "weights by layer": (of_each_layer, (f32(4, 8, 8), f32(16, 8)), ((1, 8, 1), (8, 1)), None),
    "a loop's condition": (settled, (f32(64),), ((8,),), None),
    "a loop in a loop": (loop_in_a_loop, (f32(16, 8), f32(8, 8)), ((8, 1), (8, 1)), None),
    "a branch result that nothing reads": (first_of_two, (f32(16, 8), f32(8, 8)), ((8, 1), (8, 1)), None),
    "a condition": (lambda p, x: lax.cond(p > 0, lambda x: x.sum(0), lambda x: x[0] * 2, x), (f32(), f32(16, 8)),
                    ((), (1, 8)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_single_ops_send_what_was_predicted(name):
    fn, args, strategies, out = OPS[name]
    function = shardfn.shard(fn, strategies, out)
    predicted, real = function.plan(*args).collectives, compiled.read(function.lower(*args).compile()).collectives

    def sent(side):
        return {k: sum(c.total_bytes for c in side if c.kind == k) for k in {c.kind for c in side}}

    assert sent(predicted) == sent(real)


def propagated(fn, axes, specs, outs, *args):
    """The flow before anything is worked out."""
    module = shardy.flat(jax.jit(fn).trace(*args).lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo"))
    return shardy.PreparedModule(module).propagate(axes, specs, outs)


def kinds(partitioned):
    return [(c.kind, c.dtype, c.bytes_sent) for c in collectives(partitioned)]


@pytest.mark.parametrize(
    ("platform", "sent"),
    [("cpu", [("all-reduce", "f32", 2 * 7 * 2**15 // 8 * 2)]), ("tpu", [("reduce-scatter", "bf16", 7 * 2**15 // 8)])],
)
def test_a_sum_wanted_in_pieces(platform, sent):
    specs = (((), ("a",)), (("a",), ()))
    partitioned = propagated(jnp.matmul, (("a", 8),), specs, ((("a",), ()),), bf16(64, 64), bf16(64, 256))
    assert kinds(partitioned) == []
    assert kinds(insert_collectives(partitioned, platform)) == sent


@pytest.mark.parametrize(("platform", "sent"), [("cuda", ("f32", 7 * 8 * 64 * 4)), ("tpu", ("bf16", 7 * 8 * 64 * 2))])
def test_weights_are_gathered_once_for_all_their_uses(platform, sent):
    def both_ways(x, w):
        return jnp.einsum("bd,kd->bk", x @ w, w)

    partitioned = propagated(
        both_ways, (("a", 8),), ((("a",), ()), (("a",), ())), ((("a",), ()),), f32(4096, 64), f32(64, 64)
    )
    assert kinds(insert_collectives(partitioned, platform)) == [("all-gather", *sent)]


MESHES = {"2 x 4": (2, 4), "4 x 2": (4, 2)}


def loss_of_rows(t, i):
    return jax.grad(lambda t: (t[i] ** 2).sum())(t)


# Programs in which one axis shards the batch and the weight, and the other shards neither.
IDLE = {
    "lookup": (lambda t, i: t[i], (f32(128, 64), i32(16, 32))),
    "lookup and its gradient": (loss_of_rows, (f32(128, 64), i32(16, 32))),
    "product, contracted": (lambda w, x: jnp.einsum("bsd,dv->bsv", x, w), (f32(64, 128), f32(16, 32, 64))),
    "product, own dim": (lambda w, x: jnp.einsum("bsd,vd->bsv", x, w), (f32(128, 64), f32(16, 32, 64))),
    "product of few rows": (lambda w, x: jnp.einsum("bd,dv->bv", x, w), (f32(512, 64), f32(16, 512))),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", IDLE)
def test_idle_axes_are_used(name, mesh):
    fn, args = IDLE[name]
    layout = shardfn.mindspore.Layout(MESHES[mesh], ("data", "model"))
    specs = tuple(layout("data", *("None",) * (len(a.shape) - 1)) for a in args)
    function = shardfn.shard(fn, specs)
    predicted, real = function.plan(*args).collectives, compiled.read(function.lower(*args).compile()).collectives
    assert sum(c.total_bytes for c in predicted) == sum(c.total_bytes for c in real)


@pytest.mark.parametrize(
    ("before", "after", "through"),
    [
        ("a -", "a -", []),
        ("- -", "a -", [""]),
        ("a -", "- -", ["all-gather"]),
        ("a -", "- a", ["all-to-all"]),
        ("a -", "b -", ["collective-permute"]),
        ("ab -", "a -", ["all-gather"]),
        ("ab -", "b -", ["collective-permute", "all-gather"]),
        ("ab -", "a b", ["all-to-all"]),
        ("a -", "a b", [""]),
        ("a -", "- ab", ["", "all-to-all", "collective-permute"]),
        ("ab -", "- a", ["all-gather", ""]),
    ],
)
def test_steps_lead_from_one_layout_to_the_other(before, after, through):
    sizes = {"a": 2, "b": 2}
    before, after = (tuple(tuple(dim.replace("-", "")) for dim in text.split()) for text in (before, after))
    path = resharding_steps(before, after, sizes)
    assert [step.kind for step in path] == through
    assert (path[-1].after if path else before) == after


@pytest.mark.parametrize("used", [(), ("a:(2)6",), ("a:(1)4", "b"), ("a:(3)4",)])
def test_axes_in_parts_come_together_again(used):
    mesh = {"a": 12, "b": 2}
    sizes, parts = split_axes(mesh, used)
    for name in (*mesh, *used):
        assert joined_axes(parts[name], mesh) == (name,)
    assert sizes["b"] == 2 and parts["b"] == ("b",)


@pytest.mark.parametrize(
    ("size", "out", "window", "extent"),
    [
        (64, 64, WindowDim(0, 0, 0, low=-1, extent=3), (1, 1)),
        (64, 32, WindowDim(0, 0, 0, stride=2, extent=2), (0, 0)),
        (64, 32, WindowDim(0, 0, 0, stride=2, extent=3), (0, 1)),
        (64, 48, WindowDim(0, 0, 0, low=3), (11, 1)),
        (64, 64, WindowDim(0, 0, 0, low=0, extent=1), (0, 0)),
    ],
)
def test_halo_extent_is_the_rows_that_neighbours_send(size, out, window, extent):
    assert halo_extent(size, out, 8, window) == extent


def test_an_empty_slice_may_be_padded_along_a_cut_dim():
    """As in the gradient of an associative scan, where the search tries such layouts."""
    assert halo_permutes(0, 64, 8, WindowDim(0, 0, 0, low=-63)) == ()

    def recurrence(x):
        return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x / 3, x), axis=1)[1].sum()

    assert shardfn.plan(jax.grad(recurrence), f32(8, 64, 64), level=1, device="cpu:8").cost.time_s > 0


def test_a_layout_that_does_not_fit_is_found_before_the_passes_run():
    shape = f32(8, 8)
    module = jax.jit(jnp.matmul).lower(shape, shape).compiler_ir("stablehlo")
    with pytest.raises(Exception, match="doesn't match tensor rank: 3 != 2"):
        shardy.PreparedModule(module).propagate((("a", 8),), [(("a",), (), ()), None], [None])


def test_propagate_with_constraints_in_a_loop_keeps_each():
    def function(x, w, v):
        def step(c, _):
            return jnp.tanh(c @ w + (c @ v) @ w), c.sum()

        return jax.lax.scan(step, jax.nn.relu(x @ (w + v)), None, length=3)

    module = shardy.flat(jax.jit(function).lower(f32(8, 4), f32(4, 4), f32(4, 4)).compiler_ir("stablehlo"))
    spec = (("a",), ())
    dots = [op.site for op in shardy.read_graph(module).ops if op.name == "dot_general"]
    assert len(dots) == 4 and len(set(dots)) == 4
    for operands in ((spec, spec), (None, spec), (spec, None), (None, None)):
        constraints = {site: OpConstraint(operands, (spec,)) for site in dots}
        found = shardy.PreparedModule(module).propagate((("a", 2),), [None] * 3, [None, None], constraints)
        made = [found.specs[op.outputs[0]] for op in found.graph.ops if op.name == "dot_general"]
        assert made == [spec] * 4


def test_a_constraint_on_what_lies_so_by_itself_costs_nothing():
    """XLA compiles one program of both."""

    def fn(x, w, is_held):
        y = jnp.maximum(x @ w, 0) + 1
        if is_held:
            mesh = jax.sharding.AbstractMesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
            y = lax.with_sharding_constraint(y, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows")))
        return jnp.sum(y * y, 0), y * 2.0

    rows = shardfn.mindspore.Layout((8,), ("rows",))
    one, two = (
        shardfn.shard(lambda x, w, h=h: fn(x, w, h), (rows("rows", "None"), rows("None", "None"))).plan(
            f32(64, 128), f32(128, 256)
        )
        for h in (False, True)
    )
    assert [op.name for op in one.partitioned.graph.ops] == [op.name for op in two.partitioned.graph.ops]
    assert one.cost == two.cost


@pytest.mark.parametrize(
    ("fn", "shape"),
    [(lambda x: x.reshape(0, 4), (0, 2, 2)), (lambda x: x.reshape(4, 0) + 1, (8, 0)), (lambda x: x[:0].reshape(0, 8).sum(0), (8, 4))],
    ids=["empty", "sharded", "sliced"],
)  # fmt: skip
def test_reshape_without_elements_has_a_rule(fn, shape):
    x = jax.ShapeDtypeStruct(shape, "float32")
    plan = shardfn.plan(fn, x, in_strategy=(tuple(8 if n == 8 else 1 for n in shape),), device="cpu:8")
    assert plan.partitioned.graph.unruled == ()
    assert plan.cost.bytes_sent == 0


@pytest.mark.parametrize("rows", [64, 68, 72])
def test_a_table_is_gathered_up_to_the_rows_that_touch_as_few_bytes(rows):
    """68 rows touch as many bytes either way: XLA gathers the table, as for fewer, and does not all-reduce what is read."""
    lookup = shardfn.shard(lambda t, i: t[i], ((4, 1), (1, 4)), ((1, 4, 1),), device=jax.devices()[:4])
    found = lookup.explain(f32(rows, 16), i32(8, 8), compiled=True).to_dict()["compiled"]["kinds"]
    assert all(kind["predicted"]["bytes_sent"] == kind["compiled"]["bytes_sent"] for kind in found.values())
    assert ("all-reduce" in found) == (rows == 72)
