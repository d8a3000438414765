"""The algebra of placing: every cut where it was asked for, on axes as design and MindSpore have them."""

import itertools
import math
import time

import hypothesis
import jax
import jax.numpy as jnp
from hypothesis import assume, given
from hypothesis import strategies as st

import shardfn
from shardfn.frontend.strategy import AUTO, Leaf
from shardfn.ir.divisors import primes
from shardfn.mindspore.layout import Layout
from shardfn.mindspore.parallel import layout_of
from shardfn.planning.meshes import place

DEVICES = (2, 3, 4, 6, 8, 12, 24, 64, 4096)


@st.composite
def cuts_of(draw, rank, devices, powers_of_a_chain=False):
    """Cuts with a product that divides the device count."""
    cuts, left = [1] * rank, devices
    for dim in draw(st.permutations(range(rank))):
        fit = [c for c in range(1, left + 1) if left % c == 0]
        if powers_of_a_chain:  # each of them divides the next
            fit = [c for c in itertools.accumulate([1, *primes(devices)], lambda a, b: a * b) if left % c == 0]
        cuts[dim] = draw(st.sampled_from(fit))
        left //= cuts[dim]
    return tuple(cuts)


@st.composite
def calls(draw, devices=DEVICES, **options):
    """Classes of the dims of some arrays, cuts for most of them, and a device count."""
    count = draw(st.sampled_from(devices))
    classes = draw(st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), min_size=1, max_size=4))
    cuts = [None if draw(st.integers(0, 5)) == 0 else draw(cuts_of(len(c), count, **options)) for c in classes]
    return cuts, classes, count


def placed(cuts, classes, count):
    """The placement and the problems of arrays called x0, x1, …"""
    problems = []
    return place(leaves_of(cuts), cuts, classes, count, problems), problems


def leaves_of(cuts):
    return [
        Leaf(f"x{i}", f"argument {i} `x{i}`", tuple(c or ()), "float32", AUTO if c is None else c, f"in_strategy[{i}]")
        for i, c in enumerate(cuts)
    ]


def chains_of(cuts, classes):
    """{(class, how often it stood on the array before): its (array, dim, cut)s}, in order of first appearance.

    A class that stands twice on an array (`x @ x.T`) is two there.
    """
    found = {}
    for i, (leaf_cuts, leaf_classes) in enumerate(zip(cuts, classes, strict=True)):
        met = {}
        for dim, (cut, class_) in enumerate(zip(leaf_cuts or (), leaf_classes)):  # noqa: B905
            if cut > 1:
                met[class_] = met.get(class_, -1) + 1
                found.setdefault((class_, met[class_]), []).append((i, dim, cut))
    return found


def is_nested(cuts):
    return all(b % a == 0 for a, b in itertools.pairwise(sorted(cuts)))


# What always holds


@given(calls())
def test_the_cuts_are_those_asked_for(call):
    cuts, _, count = call
    made, problems = placed(*call)
    assume(not problems)
    sizes = dict(made.axes)
    assert len(sizes) == len(made.axes)
    assert math.prod(sizes.values()) == count
    for asked, spec in zip(cuts, made.specs, strict=True):
        if asked is None:
            assert spec is None
            continue
        assert tuple(math.prod(sizes[a] for a in dim) for dim in spec) == asked
        used = [a for dim in spec for a in dim]
        assert len(set(used)) == len(used), "an axis cuts one dim of an array"


@given(calls())
def test_nested_cuts_of_a_class_share_the_major_axes(call):
    cuts, classes, _ = call
    made, problems = placed(*call)
    assume(not problems)
    for members in chains_of(cuts, classes).values():
        if is_nested([cut for *_, cut in members]):
            specs = sorted((made.specs[i][dim] for i, dim, _ in members), key=len)
            assert all(long[: len(short)] == short for short, long in itertools.pairwise(specs))


@given(calls(powers_of_a_chain=True))
def test_the_grid_lists_the_classes_then_what_is_left_over(call):
    cuts, classes, count = call
    chains = {k: sorted({cut for *_, cut in members}) for k, members in chains_of(cuts, classes).items()}
    product = math.prod(c[-1] for c in chains.values())
    assume(count % product == 0)
    made, problems = placed(*call)
    assert not problems
    grid, where = [], {}
    for key, nested in chains.items():
        for before, cut in itertools.pairwise([1, *nested]):
            grid.append(cut // before)
            where[key, cut] = len(grid)
    left_over = [count // product] if product < count else []
    assert [size for _, size in made.axes] == [*grid, *left_over]
    names = [name for name, _ in made.axes]
    for key, members in chains_of(cuts, classes).items():
        first = where[key, chains[key][0]] - 1
        for i, dim, cut in members:
            assert made.specs[i][dim] == tuple(names[first : where[key, cut]])


@given(calls())
def test_classes_have_axes_of_their_own_where_these_fit(call):
    cuts, classes, count = call
    chains = chains_of(cuts, classes)
    needed = math.prod(math.lcm(*(cut for *_, cut in members)) for members in chains.values())
    assume(count % needed == 0 and all(is_nested([c for *_, c in members]) for members in chains.values()))
    made, problems = placed(*call)
    assert not problems
    of = [{a for i, dim, _ in members for a in made.specs[i][dim]} for members in chains.values()]
    assert sum(map(len, of)) == len(set().union(*of))
    unused = [name for name, _ in made.axes if name not in set().union(*of)]
    assert unused == [name for name, _ in made.axes][len(made.axes) - len(unused) :], "repeat axes are the fastest"


@given(calls(devices=(1,)))
def test_one_device_holds_everything(call):
    cuts, _, _ = call
    made, problems = placed(*call)
    assert (made.axes, problems) == ((), [])
    assert made.specs == tuple(None if c is None else ((),) * len(c) for c in cuts)


# MindSpore's rules


@given(st.data())
def test_a_lone_array_lies_as_from_strategy_says(data):
    count = data.draw(st.sampled_from(DEVICES))
    cuts = data.draw(cuts_of(data.draw(st.integers(0, 4)), count))
    classes = data.draw(st.lists(st.integers(0, 2), min_size=len(cuts), max_size=len(cuts)).map(tuple))
    made, problems = placed([cuts], [classes], count)
    assert not problems
    wanted = Layout.from_strategy(cuts, count)
    assert as_layout(made, 0).device_matrix == wanted.device_matrix
    assert as_layout(made, 0).tensor_map == wanted.tensor_map


def as_layout(made, leaf):
    names, sizes = zip(*made.axes, strict=True)
    return Layout(sizes, names)(*("None" if not d else d[0] if len(d) == 1 else d for d in made.specs[leaf]))


@given(st.data())
def test_a_matmul_lies_as_mindspore_says(data):
    """Its device matrix is (a, k, c) for ((a, k), (k, c)), then what is left over; an axis of size 1 is not listed here."""
    count = data.draw(st.sampled_from(DEVICES))
    a, k, c = data.draw(cuts_of(3, count))
    shape = (a * 2, k * 3, c * 2)
    wanted = Layout((a, k, c, count // (a * k * c)), ("a", "k", "c", "repeat"))
    made, problems = placed([(a, k), (k, c)], [(0, 1), (1, 2)], count)
    assert not problems
    assert [s for _, s in made.axes] == [s for s in wanted.device_matrix if s > 1]
    assert as_layout(made, 0).slices(shape[:2]) == wanted("a", "k").slices(shape[:2])
    assert as_layout(made, 1).slices(shape[1:]) == wanted("k", "c").slices(shape[1:])


@hypothesis.settings(max_examples=20)
@given(st.data())
def test_so_does_a_planned_matmul(data):
    count = data.draw(st.sampled_from(DEVICES))
    a, k, c = data.draw(cuts_of(3, count))
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((a * 2, k * 3), (k * 3, c * 2)))
    out = Layout((a, k, c, count // (a * k * c)), ("a", "k", "c", "repeat"))("a", "c")
    made = shardfn.plan(jnp.matmul, x, w, in_strategy=((a, k), (k, c)), out_strategy=((a, c),), device=f"cpu:{count}")
    assert [s for _, s in made.axes] == [s for s in out.device_matrix if s > 1]
    assert layout_of(made, "result").slices((a * 2, c * 2)) == out.slices((a * 2, c * 2))


# What cannot be


@st.composite
def crowded_calls(draw):
    """Few classes, and every array cut into as many pieces as there are devices."""
    count = draw(st.sampled_from((4, 6, 8, 12, 24, 64)))
    classes = draw(st.lists(st.permutations(range(3)).map(lambda p: tuple(p[:2])), min_size=3, max_size=5))
    first = [draw(st.sampled_from([c for c in range(2, count) if count % c == 0])) for _ in classes]
    return [(a, count // a) for a in first], classes, count


@given(crowded_calls())
def test_a_conflict_names_the_first_array_too_many_and_one_before(call):
    cuts, classes, count = call
    made, problems = placed(*call)
    hypothesis.event("conflict" if problems else "none")
    if not problems:
        return
    assert made.specs == (None,) * len(cuts)
    (problem,) = problems
    named = [i for i in range(len(cuts)) if f"argument {i} `x{i}`" in problem.what]
    assert len(named) == 2
    assert all(f"in_strategy[{i}] = {cuts[i]!r}" in problem.where for i in named)
    assert str(count) in problem.what
    assert problem.fix
    upto = named[1] + 1
    assert placed(cuts[:upto], classes[:upto], count)[1]
    assert not placed(cuts[: upto - 1], classes[: upto - 1], count)[1]


@st.composite
def calls_of_one_cut_each(draw):
    """Every class is cut one number of ways, wherever it is cut."""
    count = draw(st.sampled_from((2, 4, 6, 8, 12, 24)))
    fixed = [draw(st.sampled_from([c for c in range(2, count + 1) if count % c == 0])) for _ in range(4)]
    classes = draw(st.lists(st.lists(st.integers(0, 3), max_size=3, unique=True).map(tuple), min_size=2, max_size=5))
    return [tuple(fixed[c] for c in row) for row in classes], classes, count


@given(calls_of_one_cut_each())
def test_what_is_refused_is_impossible(call):
    """Against all ways of giving each class some of the prime factors of the device count."""
    cuts, classes, count = call
    assume(all(count % math.prod(c) == 0 for c in cuts))
    used = {k: cut for row, row_cuts in zip(classes, cuts, strict=True) for k, cut in zip(row, row_cuts, strict=True)}
    factors = primes(count)
    subsets = [s for r in range(len(factors) + 1) for s in itertools.combinations(range(len(factors)), r)]
    ways = [[s for s in subsets if math.prod(factors[i] for i in s) == cut] for cut in used.values()]
    possible = any(
        all(not set(chosen[a]) & set(chosen[b]) for row in classes for a, b in itertools.combinations(row, 2))
        for chosen in (dict(zip(used, sets, strict=True)) for sets in itertools.product(*ways))
    )
    assert bool(placed(*call)[1]) != possible


def test_an_impossible_ring_is_refused_in_no_time():
    """Nine classes, each tied to the next by an array that takes all axes: there is no such ring of odd length."""
    classes = [(i, (i + 1) % 9) for i in range(9)]
    start = time.process_time()
    made, problems = placed([(64, 64)] * 9, classes, 4096)
    assert made.axes == () and len(problems) == 1
    assert time.process_time() - start < 3
    assert not placed([(64, 64)] * 8, classes[:8], 4096)[1]
