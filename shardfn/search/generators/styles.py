"""Plans of one parallel style: data parallel, ZeRO-1, FSDP, tensor parallel, or tensor parallel with FSDP.

A style gives every mesh axis a role. Batch axes shard the batch and the other arrays that the style shards. Tensor axes
shard dimensions of parameters, and the matmuls with them. The best plan of the style at the objective is the answer; arrays
with an entry keep it, and the mesh of the entries is the mesh.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from shardfn.errors import StrategyError, fail
from shardfn.ir.divisors import divisors
from shardfn.ir.model import Axes, mesh_sizes, mesh_sizes_text
from shardfn.ir.op_traits import CONTRACTIONS
from shardfn.ir.sources import looked_up, sources_of
from shardfn.search.engine import Archive
from shardfn.search.generators.default_policy import group_name
from shardfn.search.moves import (
    ArgumentSharding,
    are_meant,
    argument_specs,
    batch_arguments,
    is_optimizer_state,
    is_state_or_gradient,
    matmul_constraints,
)
from shardfn.search.problem import (
    Answer,
    OpConstraints,
    Proposal,
    SearchCandidate,
    SearchProblem,
    array_bytes,
    is_no_worse,
    runner_up,
)

Groups = tuple[int, ...]

BASELINES, TENSOR_BASELINES = "baselines", "tensor baselines"
"""The names of the generators `baselines` and `tensor_baselines`."""

GROUPS = 4
"""The largest dimension groups of parameters, each of which begins a set to shard over tensor axes."""


@dataclasses.dataclass(frozen=True)
class Style:
    """What a style shards over batch axes: the batch, and the arrays of `also_sharded`. Over tensor axes: parameters."""

    kind: tuple[str, ...]
    """Its parts, as `Plan.kind` names them."""
    has_batch: bool = True
    """Whether batch axes are used. Where no argument has a batch, they shard the arrays of `also_sharded` alone."""
    also_sharded: tuple[ArgumentSharding, ...] = ()
    """The alternatives to try; empty shards the batch alone."""
    has_tensor: bool = False


STYLES = {
    "data_parallel": Style(("data parallel",)),
    "zero1": Style(("ZeRO-1",), also_sharded=(ArgumentSharding.STATE,)),
    "fsdp": Style(("FSDP",), also_sharded=(ArgumentSharding.ALL, ArgumentSharding.SIZEABLE)),
    "tensor_parallel": Style(("tensor parallel",), has_batch=False, has_tensor=True),
    "fsdp_tensor_parallel": Style(("FSDP", "tensor parallel"), also_sharded=(ArgumentSharding.ALL,), has_tensor=True),
}
"""By the word that asks for it."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """A mesh whose axes shard the batch or the parameters of matmuls."""

    axes: Axes
    batch: tuple[str, ...]
    tensor: tuple[str, ...]


def search(style: str, problem: SearchProblem) -> Answer:
    """The best plan of a style.

    Raises:
      StrategyError: the function, its shapes or its entries allow no plan of the style.
    """
    wanted = STYLES[style]
    batch = batch_groups(problem)
    if problem.devices == 1:
        specs = tuple(((),) * len(shape) for shape in problem.shapes)
        return Answer((), specs, ("",) * len(specs), "one device")
    _check(style, problem, batch)
    archive = Archive(problem)
    for proposal in _proposals(style, problem, batch):
        if len(archive) and problem.seconds_left <= 0:
            break
        archive.evaluate(proposal)
    if not len(archive):
        fail(StrategyError, f"no plan is {' and '.join(wanted.kind)} over {problem.devices} devices",
             where=f"style = {style!r}", why=_why_none(problem, wanted, batch),
             fix="leave entries out, or use another style" if problem.axes else _other_batch(problem, wanted, batch)
                 + "use another number of devices, other shapes, or another style")  # fmt: skip
    ranked = archive.ranked(problem.level)
    best = min(_as_good(problem, ranked), key=lambda one: sum(map(any, one.specs)))
    others = [one for one in ranked if one is not best]
    best = _without_constraints(problem, best)
    chosen = f"the best of {len(others) + 1} plans" if others else "the only plan"
    policy = f"style {style!r}: {chosen} at level {problem.level}: {best.name}"
    reasons = tuple("" if given is not None else f"style {style!r}" for given in problem.specs)
    return Answer(best.axes, best.specs, reasons, policy, runner_up(best, others), constraints=best.constraints,
                  others=tuple(others))  # fmt: skip


def baselines(problem: SearchProblem) -> Iterator[Proposal]:
    """Nothing sharded, and the plans that people write by hand: those of each style, with the largest parameters sharded over
    tensor axes, on the mesh of two axes nearest to a square and on one axis.

    None where the user's entries shard arrays.
    """
    if are_meant(problem) and problem.devices > 1:
        batch = batch_groups(problem)
        axes = problem.axes or (("a", problem.devices),)
        yield Proposal("nothing sharded", axes, argument_specs(problem, axes, {}))
        for style, wanted in STYLES.items():
            if batch or not wanted.has_batch:
                leading: dict[bool, Roles] = {}
                for roles in _roles(style, problem, batch):
                    leading.setdefault(bool(roles.batch), roles)
                for roles in leading.values():
                    yield from _with_roles(wanted, problem, roles, batch, most=1)
        for group in _other_batch_dimensions(problem, batch):
            for roles in _roles("data_parallel", problem, (group,)):
                yield from _with_roles(STYLES["data_parallel"], problem, roles, (group,))


def _other_batch_dimensions(problem: SearchProblem, batch: Groups) -> Groups:
    """Where a loop iterates over the dimension of `batch_groups`, the others of the batch: sequences in the order of time."""
    own = batch_arguments(problem)
    found = {g: n for i in sorted(own) for g, n in zip(problem.groups[i], problem.shapes[i], strict=True)}
    if not any(found.get(group) in problem.graph.trip_counts for group in batch):
        return ()
    kept = {group for i, of in enumerate(problem.groups) if i not in own for group in of}
    return tuple(group for group in found if group not in kept and group not in batch)


def tensor_baselines(problem: SearchProblem, archive: Archive) -> Iterator[Proposal]:
    """Tensor parallelism on every mesh, with other sets of dimensions sharded too, and its mixes with data parallelism and FSDP.

    Meshes with better candidates so far, of whichever generator, come earlier. None where the user's entries shard arrays.
    """
    if not are_meant(problem) or problem.devices == 1:
        return
    batch = batch_groups(problem)
    left: dict[Axes, list[Iterator[Proposal]]] = {}
    for style, wanted in STYLES.items():
        for roles in _roles(style, problem, batch) if wanted.has_tensor else ():
            left.setdefault(roles.axes, []).append(_with_roles(wanted, problem, roles, batch))
    rounds = dict.fromkeys(left, 0)
    while left:
        best = [mesh_sizes(one.axes) for one in archive.best_of_each_mesh(problem.level)]
        places = {axes: best.index(sizes) if (sizes := mesh_sizes(axes)) in best else len(best) for axes in left}
        axes = min(left, key=lambda axes: rounds[axes] + places[axes])
        rounds[axes] += 1
        for proposals in tuple(left[axes]):
            if (proposal := next(proposals, None)) is not None:
                yield proposal
            else:
                left[axes].remove(proposals)
        if not left[axes]:
            del left[axes]


def _proposals(style: str, problem: SearchProblem, batch: Groups) -> Iterator[Proposal]:
    """The plans of a style that shard the batch over all batch axes."""
    for roles in _roles(style, problem, batch):
        yield from _with_roles(STYLES[style], problem, roles, batch)


def _with_roles(
    wanted: Style, problem: SearchProblem, roles: Roles, batch: Groups, most: int | None = None
) -> Iterator[Proposal]:
    """Those on a mesh, with at most so many sets of groups over tensor axes."""
    for groups in _tensor_groups(problem, roles, batch)[:most] if wanted.has_tensor else [()]:
        yield from _on_mesh(problem, wanted, roles, batch, groups)


def batch_groups(problem: SearchProblem) -> Groups:
    """The dimension groups of the batch: dimension 0 of every argument that has them and is no state.

    State is what a result replaces, and the gradients of it. It may have the batch in any dimension, as a cache has. Groups that
    a loop iterates over or that the program looks up count only if there are no others; then those that a result has in another
    dimension, then those that state has. If there are several, those of the size of the group with the most bytes of computed
    values.

    A style shards one batch. `baselines.batch_arguments` only tells arguments apart from parameters, for a search that tries
    all of their dimensions. `plan_kind` names a finished plan by its arrays alone, maybe with several batches.
    """
    graph, of = problem.graph, problem.value_groups
    looked = looked_up(graph, sources_of(graph, problem.inputs))
    is_state = is_state_or_gradient(problem)
    places: dict[int, set[tuple[int, bool, bool]]] = {}
    sizes: dict[int, int] = {}
    for i, (shape, groups) in enumerate(zip(problem.shapes, problem.groups, strict=True)):
        for d, (size, group) in enumerate(zip(shape, groups, strict=True)):
            places.setdefault(group, set()).add((d, is_state[i], (1 << i, tuple(shape), d) in looked))
            sizes[group] = size
    elsewhere = {group for v in graph.outputs for group in of[v][1:]}
    ranked: dict[tuple[bool, bool, bool], list[int]] = {}
    for group, at in places.items():
        own = {(d, is_looked_up) for d, is_of_state, is_looked_up in at if not is_of_state}
        if {d for d, _ in own} == {0} and sizes[group] > 1:
            is_no_batch = sizes[group] in graph.trip_counts or own == {(0, True)}
            has_state = any(is_of_state for _, is_of_state, _ in at)
            ranked.setdefault((is_no_batch, group in elsewhere, has_state), []).append(group)
    if not ranked:
        return ()
    best = ranked[min(ranked)]
    read = collections.Counter[int]()
    for value, groups in zip(problem.inputs, problem.groups, strict=True):
        read.update(dict.fromkeys(groups, array_bytes(graph.values[value])))
    most = max(best, key=lambda g: problem.group_bytes.get(g, 0) - read[g])
    return (most, *(g for g in best if g != most and sizes[g] == sizes[most]))


def _check(style: str, problem: SearchProblem, batch: Groups) -> None:
    """Refuse a style that the function cannot have on any mesh."""
    wanted = STYLES[style]
    if not batch and wanted.has_batch and (wanted.has_tensor or not wanted.also_sharded):
        fail(StrategyError, f"style {style!r} shards a batch, and no argument has one", where=f"style = {style!r}",
             why="a batch is dimension 0 of an argument that is no parameter",
             fix='use style="fsdp" or style="tensor_parallel", or give entries')  # fmt: skip
    if wanted.also_sharded == (ArgumentSharding.STATE,) and not any(is_optimizer_state(problem)):
        fail(StrategyError, f"style {style!r} shards optimizer state, and the function has none", where=f"style = {style!r}",
             why="optimizer state comes back as a result, and only elementwise operations read it",
             fix='use style="data_parallel" or style="fsdp"')  # fmt: skip


def _why_none(problem: SearchProblem, wanted: Style, batch: Groups) -> str:
    mesh = f" on the mesh {mesh_sizes_text(problem.axes)} of the entries" if problem.axes else ""
    if wanted.has_tensor:
        return f"no mesh axis is left that divides dimensions of parameters{mesh}"
    if not batch:
        return f"no argument has a batch, and the devices divide no dimension{mesh}"
    size = next(
        shape[0] for shape, groups in zip(problem.shapes, problem.groups, strict=True) if groups[:1] == batch[:1]
    )
    name = group_name(problem, batch[0]).split()[0]
    return f"dimension 0 of {name} has {size} elements, which the batch axes do not divide{mesh}"


def _other_batch(problem: SearchProblem, wanted: Style, batch: Groups) -> str:
    """Where another dimension of an argument of the batch can be the batch, as no parameter has it, the entry that says so."""
    of_parameters = {group for groups in problem.groups if not set(groups) & set(batch) for group in groups}
    for i, (name, shape, groups) in enumerate(zip(problem.names, problem.shapes, problem.groups, strict=True)):
        for d, size in enumerate(shape if groups[:1] == batch[:1] and not wanted.has_tensor else ()):
            if d and size % problem.devices == 0 and groups[d] not in of_parameters:
                entry = str(tuple(problem.devices if other == d else 1 for other in range(len(shape))))
                entries = ", ".join(entry if other == i else "AUTO" for other in range(len(problem.names)))
                written = (
                    f": in_strategy=({entries})" if len(problem.names) > 1 and "/" not in "".join(problem.names) else ""
                )
                return (
                    f"if dimension {d} of {name} is the batch, give it the entry {entry} beside the style{written}; or "
                )
    return ""


def _roles(style: str, problem: SearchProblem, batch: Groups) -> Iterator[Roles]:
    """The meshes to try with the role of each axis, the one of equal sizes first."""
    wanted = STYLES[style]
    if problem.axes:
        names = tuple(name for name, _ in problem.axes)
        fixed = _roles_of_entries(problem, batch) if wanted.has_tensor else dict.fromkeys(names, True)
        for choice in itertools.product(*((fixed[name],) if name in fixed else (True, False) for name in names)):
            is_batch = dict(zip(names, choice, strict=True))
            mine = tuple(name for name in names if is_batch[name])
            rest = tuple(name for name in names if not is_batch[name])
            if bool(rest) == wanted.has_tensor and (mine or not wanted.has_batch) and (batch or not mine):
                yield Roles(problem.axes, mine, rest)
        return
    n = problem.devices
    if not wanted.has_tensor:
        yield Roles((("a", n),), ("a",), ())
        return
    for size in sorted(divisors(n)[1:-1], key=lambda t: (max(t, n // t), t)) if batch else ():
        yield Roles((("a", n // size), ("b", size)), ("a",), ("b",))
    if not wanted.has_batch:
        yield Roles((("a", n),), (), ("a",))


def _roles_of_entries(problem: SearchProblem, batch: Groups) -> dict[str, bool]:
    """The axes that entries shard, and whether over the batch."""
    found: dict[str, bool] = {}
    for spec, groups in zip(problem.specs, problem.groups, strict=True):
        for group, dim in zip(groups, spec or (), strict=False):
            for axis in dim:
                found[axis] = found.get(axis, False) or group in batch
    return found


def _tensor_groups(problem: SearchProblem, roles: Roles, batch: Groups) -> list[Groups]:
    """Sets of dimension groups to shard over the tensor axes; no parameter has two groups of a set.

    A set begins with what entries shard, or with one of the largest groups; the others follow, the largest first. Sets for which
    matmuls make fewer bytes of partial sums come earlier: heads and hidden dimensions before the width of the model.
    """
    shards = math.prod(size for name, size in roles.axes if name in roles.tensor)
    common: dict[int, int] = {}  # the largest number of shards that divides all dimensions of a group, such as heads
    for value, groups in zip(problem.graph.values, problem.value_groups, strict=True):
        for n, group in zip(value.shape, groups, strict=True):
            common[group] = math.gcd(common.get(group, 0), n) if n > 1 else common.get(group, 0)
    size_of: dict[int, float] = {}
    together: dict[int, set[int]] = {}
    given: dict[int, None] = {}
    for value, shape, groups, spec in zip(problem.inputs, problem.shapes, problem.groups, problem.specs, strict=True):
        if set(groups) & set(batch):
            continue
        mine = [group for d, (n, group) in enumerate(zip(shape, groups, strict=True))
                if common[group] % shards == 0 and n % shards == 0
                and not (d == 0 < len(shape) - 1 and n in problem.graph.trip_counts)]  # fmt: skip
        for group in mine:
            size_of[group] = size_of.get(group, 0.0) + array_bytes(problem.graph.values[value])
            together.setdefault(group, set()).update(other for other in mine if other != group)
        given |= {
            g: None for g, dim in zip(groups, spec or (), strict=False) if g in size_of and set(dim) & set(roles.tensor)
        }
    largest = sorted(size_of, key=lambda g: (-size_of[g], g))
    found: dict[Groups, None] = {}
    for first in [tuple(given)] if given else [(g,) for g in largest[:GROUPS]]:
        chosen = list(first)
        for group in largest:
            if group not in chosen and not together[group] & set(chosen):
                chosen.append(group)
        found[tuple(sorted(chosen))] = None
    return sorted(found, key=lambda groups: _partial_bytes(problem, groups))


def _partial_bytes(problem: SearchProblem, groups: Groups) -> float:
    """Bytes of what matmuls make by a sum over any of some groups, in all iterations of loops."""
    total, of = 0.0, problem.value_groups
    for op in problem.graph.ops:
        if op.name in CONTRACTIONS and any(of[op.inputs[i]][dim] in groups for i, dim in op.reduced):
            total += op.trips * sum(array_bytes(problem.graph.values[v]) for v in op.outputs)
    return total


def _on_mesh(problem: SearchProblem, wanted: Style, roles: Roles, batch: Groups, tensor: Groups) -> Iterator[Proposal]:
    """Those on a mesh with its tensor axes over some dimension groups."""
    by_group = dict.fromkeys(batch, roles.batch) | dict.fromkeys(tensor, roles.tensor)
    sizes = dict(roles.axes)
    for also in wanted.also_sharded or (None,):
        constraints = matmul_constraints(problem, roles.axes, by_group) if also or tensor else {}
        specs = argument_specs(problem, roles.axes, by_group, also, roles.batch if also else ())
        of_batch = [
            i for i, groups in enumerate(problem.groups) if problem.specs[i] is None and set(groups) & set(batch)
        ]
        used = {axis for i in of_batch for groups in [problem.groups[i]]
                for group, dim in zip(groups, specs[i], strict=True) if group in batch for axis in dim}  # fmt: skip
        if (of_batch and not used >= set(roles.batch)) or not (batch or any(any(spec) for spec in specs)):
            continue
        ways = f"sharded {math.prod(sizes[a] for a in roles.batch)} ways"
        parts = [f"batch {ways}"] if roles.batch and batch else []
        parts += [f"{also.value} {'too' if batch else ways}"] if also else []
        parts += [
            f"{group_name(problem, g)} sharded {math.prod(sizes[a] for a in roles.tensor)} ways" for g in tensor[:2]
        ]
        parts += [f"{len(tensor) - 2} more groups"] if len(tensor) > 2 else []
        yield Proposal(", ".join(parts), roles.axes, specs, constraints)


def _as_good(problem: SearchProblem, ranked: Sequence[SearchCandidate]) -> list[SearchCandidate]:
    """The best candidate, and those on its mesh that are no worse but for a hundredth of its memory."""
    best, *others = ranked
    aim, most = problem.rank(best)._replace(ties=()), 1.01 * best.cost.memory.peak
    return [best] + [
        one
        for one in others
        if one.axes == best.axes
        and one.cost.memory.peak <= most
        and is_no_worse(problem.rank(one)._replace(ties=()), aim)
    ]


def _without_constraints(problem: SearchProblem, best: SearchCandidate) -> SearchCandidate:
    """The candidate without constraints if propagation partitions the program alike."""
    none: OpConstraints = {}
    bare = problem.candidate(Proposal(best.name, best.axes, best.specs, none, best.result_specs))
    return bare if bare.cost == best.cost else best
