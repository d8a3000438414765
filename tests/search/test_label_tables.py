"""What the label model charges for an op, where the partitioned program costs more than the global bytes suggest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.cost.compute import work
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.search.labels import MeshModel, build, labelling_of
from shardfn.search.labels.label_tables import SCATTERED
from shardfn.search.labels.op_labels import decoded, op_codes
from shardfn.solver.budget import Budget
from shardfn.solver.solve import solve
from tests.search.problems import S, problem_of, sent_bytes


def updated(table, rows):
    return table - 0.1 * jax.grad(lambda t: (t[rows] ** 2).sum())(table)


@pytest.mark.parametrize(("device", "more"), [("tpu-v5e:2x4", (4, 5)), ("h100:8", (0.99, 1.01))])
def test_labels_of_padded_rows_on_a_tpu_take_as_long_as_full_lanes(device, more):
    """A scatter reads and writes its operand row by row: columns that are sharded 8 ways fill 8 of 128 lanes."""
    problem = problem_of(updated, (S((65536, 64), jnp.float32), S((64,), jnp.int32)), device)
    space = build(problem.graph, MeshModel.on(problem.hardware, (("a", 8),)), {}, {}, {}, None, problem.facts)
    (scatter,) = (op for op in problem.graph.ops if op.name == "scatter")
    node, layouts = space.layouts[scatter.outputs[0]]
    rows, columns = (space.nodes[node].compute_s[layouts[:, 0] == dim].min() for dim in (0, 1))
    assert more[0] < columns / rows < more[1]


def stacked(w, x):
    def loss(w):
        return (jax.lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, w)[0] ** 2).sum()

    return jax.grad(loss)(w)


def test_labels_of_an_argument_sliced_by_two_loops_gather_in_each():
    """Forward and backward pass are two loops: sharded weights are gathered in both, and their gradient is reduce-scattered."""
    problem = problem_of(stacked, (S((4, 256, 256), jnp.float32), S((65536, 256), jnp.float32)), "h100:8")
    weights, batch = problem.inputs
    given = {weights: ((), (), ("a",)), batch: (("a",), ())}
    (result,) = problem.graph.outputs
    mesh = MeshModel.on(problem.hardware, (("a", 8),))
    space = build(problem.graph, mesh, given, {result: given[weights]}, {}, None, problem.facts)
    found = solve(labelling_of(space, problem), Budget())
    assert sent_bytes(space, found.choice) == pytest.approx(3 * 7 / 8 * 4 * 256 * 256 * 4, rel=0.01)


def scaled(w, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c * w), None), x, None, length=10)[0]


@pytest.mark.parametrize("device", ["tpu-v5e:8", "h100:8", "cpu:8"])
@pytest.mark.parametrize("of_x", [(1, 8), (1, 1)])
def test_labels_of_what_a_loop_only_reads_cost_what_the_program_sends(device, of_x):
    """Rows become columns by an all-to-all before the loop, everywhere; accelerators gather them in each iteration."""
    args = S((256, 256), jnp.float32), S((256, 256), jnp.float32)
    made = shardfn.plan(scaled, *args, device=device, in_strategy=((8, 1), of_x), out_strategy=(of_x,))
    problem = problem_of(scaled, args, device)
    weights, carry = problem.inputs
    other = ((), ("a",) if of_x == (1, 8) else ())
    mesh = MeshModel.on(problem.hardware, (("a", 8),))
    given = {weights: (("a",), ()), carry: other}
    space = build(problem.graph, mesh, given, {problem.graph.outputs[0]: other}, {}, None, problem.facts)
    found = solve(labelling_of(space, problem), Budget())
    assert sent_bytes(space, found.choice) == pytest.approx(made.cost.bytes_sent, rel=0.01)


@pytest.mark.parametrize("spec", [(("a",), ()), ((), ("a",))])
def test_labels_of_a_sharded_weight_gather_once_for_all_readers(spec):
    problem = problem_of(
        lambda w, x: jnp.tanh(x @ w) @ w.T, (S((256, 256), jnp.float32), S((65536, 256), jnp.float32)), "h100:8"
    )
    weights, batch = problem.inputs
    mesh = MeshModel.on(problem.hardware, (("a", 8),))
    space = build(problem.graph, mesh, {weights: spec, batch: (("a",), ())}, {}, {}, None, problem.facts)
    found = solve(labelling_of(space, problem), Budget())
    assert sent_bytes(space, found.choice) == pytest.approx(7 / 8 * 256 * 256 * 4, rel=0.01)


def test_labels_of_a_partial_sum_keep_the_order_of_axes():
    """Gradients whose columns the second axis shards are reduce-scattered over the first along rows. Along the columns, their
    shards would nest in the other order than in a layout."""
    problem = problem_of(lambda x, g: x.T @ g, (S((64, 32), jnp.float32), S((64, 128), jnp.float32)), "h100:8")
    (product,) = (op for op in problem.graph.ops if op.name == "dot_general")
    work, out = decoded(op_codes(product.rule, (4, 2), SCATTERED))
    (rows,), (columns,) = product.rule.results[0]
    (summed,) = product.rule.reduction
    found = {tuple(o) for w, o in zip(work.tolist(), out.tolist(), strict=True) if w == [summed, columns]}
    assert found == {(-1, columns), (rows, columns)}
    assert (columns, rows) in {tuple(o) for w, o in zip(work.tolist(), out.tolist(), strict=True) if w[0] == summed}
    assert len(np.unique(np.hstack([work, out]), axis=0)) == len(work)


@pytest.mark.parametrize("ends", ["--", "rr", "r-", "-r", "-c", "rc", "cr"])
@pytest.mark.parametrize("op", ["product", "sum"])
def test_labels_of_a_scattered_sum_cost_what_the_program_sends(op, ends):
    """Where a sum is scattered over some axes only, XLA all-reduces over those, slices, and all-reduces over the others. A
    reduce-scatter over all axes is possible for a matmul alone."""
    if op == "product":
        fn, args = lambda x, y: x.T @ y, (S((4096, 128), jnp.float32), S((4096, 64), jnp.float32))
    else:
        fn, args = lambda x: x.sum(0), (S((4096, 128, 64), jnp.float32),)
    problem = problem_of(fn, args, "h100:8")
    axes = (("a", 2), ("b", 4))
    space = build(problem.graph, MeshModel.on(problem.hardware, axes), {}, {}, {}, None, problem.facts)
    index, one = next((i, op) for i, op in enumerate(problem.graph.ops) if op.name in ("dot_general", "reduce"))
    (k,), (rows,), (columns,) = one.rule.reduction, *one.rule.results[0]
    dims = {"-": -1, "r": rows, "c": columns}
    node, _ = space.reads[index]
    work, out = decoded(space.nodes[node].labels)
    wanted = [dims[end] for end in ends]
    (at,) = np.flatnonzero((work == k).all(axis=1) & (out == wanted).all(axis=1))
    layout = shardfn.mindspore.Layout((2, 4), ("a", "b"))
    axes_of = lambda which: tuple(n for n, end in zip("ab", ends, strict=True) if end == which) or "None"  # noqa: E731
    batch = [layout(("a", "b"), *["None"] * (len(x.shape) - 1)) for x in args]
    made = shardfn.plan(
        fn, *args, device="h100:8", in_strategy=tuple(batch), out_strategy=(layout(axes_of("r"), axes_of("c")),)
    )
    assert space.nodes[node].sent[at] == pytest.approx(made.cost.bytes_sent)


def test_labels_of_a_reshape_gather_a_minor_dimension():
    """Where two dimensions become one, only the major one can stay sharded."""
    problem = problem_of(lambda x: x.reshape(64, 256), (S((64, 16, 16), jnp.float32),), "h100:8")
    (x,), (result,) = problem.inputs, problem.graph.outputs
    mesh = MeshModel.on(problem.hardware, (("a", 8),))
    for spec, kept, sent in (
        (((), ("a",), ()), ((), ("a",)), 0),
        (((), (), ("a",)), ((), ()), 7 / 8 * 64 * 256 * 4),
    ):
        space = build(problem.graph, mesh, {x: spec}, {result: kept}, {}, None, problem.facts)
        found = solve(labelling_of(space, problem), Budget())
        assert sent_bytes(space, found.choice) == sent


LINALG = {
    "cholesky": jax.lax.linalg.cholesky, "qr": jnp.linalg.qr, "svd": jnp.linalg.svd, "eigh": jnp.linalg.eigh,
    "lu": jax.lax.linalg.lu, "solve": lambda a: jnp.linalg.solve(a, a),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu:8", "h100:16"])
@pytest.mark.parametrize("function", LINALG.values(), ids=LINALG)
def test_plan_of_ops_with_several_results_uses_each_axis_once(function, device):
    """Results may ask for one axis along different dims: no layout of an operand has it twice."""
    made = shardfn.plan(function, S((64, 128, 128), jnp.float32), device=device)
    for spec in made.partitioned.specs:
        used = [axis for dim in spec for axis in dim]
        assert len(used) == len(set(used))


def test_plan_of_a_sort_counts_its_flops():
    made = shardfn.plan(lambda x: jnp.sort(x, axis=1), S((4096, 4096), jnp.float32), device="h100:8", level=2)
    assert made.cost.flops > 4096 * 4096


def softmaxed(w, x):
    def loss(w):
        p = jax.nn.softmax(jnp.tanh(x @ w) * 3, axis=-1)
        return ((p - p.mean(0)) ** 2).sum() + jnp.log(p).max()

    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize("device", ["h100:8", "tpu-v5e:2x4"])
def test_labels_of_an_unsharded_program_take_as_long_as_its_kernels(device):
    """What several kernels compute is read by each; what one of them reads twice, once."""
    problem = problem_of(softmaxed, (S((256, 256), jnp.float32), S((8192, 256), jnp.float32)), device)
    space = build(problem.graph, MeshModel.on(problem.hardware, (("a", 8),)), {}, {}, {}, None, problem.facts)
    unsharded = [node.compute_s[(node.labels < 0).all(axis=1)].item() for node in space.nodes]
    layouts = tuple(((),) * len(v.shape) for v in problem.graph.values)
    partitioned = PartitionedProgram(problem.graph, layouts, {}, (), problem.hardware.platform)
    assert sum(unsharded) == pytest.approx(work(partitioned, problem.hardware.chip).seconds, rel=0.05)
    kernels = problem.facts.kernels
    assert max(max((*k.reads, k.computes)) for k in kernels) > 1, "nothing is computed in several kernels"
    assert any(sum(k.reads) < len(k.reads) for k in kernels), "no kernel reads anything twice"
