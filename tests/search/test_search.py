"""What is true in every search mode: a user's strategy stays, values stay, the same plan twice; and searches of a user's own."""

import itertools
import os
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn import AUTO, search
from shardfn.errors import ContextError, ContextTypeError, StrategyError
from tests.search.problems import S, looped, two_layers

MODES = ("auto", "sharding_propagation", "dynamic_programming", "recursive_programming")
RNG = np.random.default_rng(0)


def randn(*shape):
    return jnp.asarray(RNG.normal(size=shape) / shape[-1] ** 0.5, jnp.float32)


def attention(x, q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bsd,dhe,bte,teh->bhst", x, q, x @ k, v[:, :, : q.shape[1]]), axis=-1)
    return jnp.einsum("bhst,btd->bshd", scores, x)


def step(w1, w2, x):
    grads = jax.grad(lambda w: (two_layers(x, *w) ** 2).mean())((w1, w2))
    return w1 - 0.1 * grads[0], w2 - 0.1 * grads[1]


PROGRAMS = {
    "two layers": (two_layers, {"x": randn(16, 8), "w1": randn(8, 32), "w2": randn(32, 8)}),
    "training step": (step, {"w1": randn(8, 32), "w2": randn(32, 8), "x": randn(16, 8)}),
    "scan": (looped, {"x": randn(16, 8), "w": randn(8, 8)}),
}


@st.composite
def seeds(draw):
    """A program, and strategies for some of its arguments that fit together on 8 devices."""
    name = draw(st.sampled_from(sorted(PROGRAMS)))
    args = PROGRAMS[name][1]
    legal = {path: [strategy for strategy in itertools.product((1, 2, 4, 8), repeat=a.ndim)
                    if 8 % np.prod(strategy) == 0 and all(n % c == 0 for n, c in zip(a.shape, strategy, strict=True))]
             for path, a in args.items()}  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(sorted(args)), unique=True, max_size=len(args)))
    return name, {path: draw(st.sampled_from(legal[path])) for path in chosen}


@pytest.mark.slow
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(seeds(), st.sampled_from(MODES), st.sampled_from([0, 1, 2]))
def test_every_mode_keeps_random_entries_and_the_values(seed, mode, level):
    name, strategies = seed
    function, args = PROGRAMS[name]
    sharded = shardfn.shard(function, parameter_plan=strategies, search_mode=mode, level=level)
    try:
        made = sharded.plan(*args.values())
    except shardfn.errors.StrategyError as error:
        assert all("hold together" in p.what for p in error.problems), error
        hypothesis.reject()
    assert {d.path: d.strategy for d in made.inputs if d.source == "you"} == strategies
    found, wanted = sharded(*args.values()), function(*args.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_keeps_a_given_result(mode):
    made = shardfn.plan(two_layers, S((16, 8), jnp.float32), S((8, 32), jnp.float32), S((32, 8), jnp.float32),
                        out_strategy=((2, 4),), search_mode=mode, device="h100:8", level=2)  # fmt: skip
    assert (made.outputs[0].strategy, made.outputs[0].source) == ((2, 4), "you")


def test_auto_is_exact_and_propagates_where_nothing_is_open():
    args = tuple(S(a.shape, a.dtype) for a in PROGRAMS["two layers"][1].values())
    open_ = shardfn.plan(two_layers, *args, device="h100:8", level=2)
    assert open_ == shardfn.plan(two_layers, *args, device="h100:8", level=2, search_mode="dynamic_programming")
    given = shardfn.plan(two_layers, *args, in_strategy=((8, 1), (1, 1), (1, 1)), device="h100:8")
    assert given.policy.startswith("every sharding was given")
    alone = shardfn.plan(two_layers, *args, in_strategy=(AUTO,) * 3, device="h100:1")
    assert all(d.strategy == (1, 1) for d in alone.inputs)


def test_registered_search_is_asked_and_kept():
    seen = []

    def rows(problem):
        seen.append(problem)
        specs = tuple(s if s is not None else (("a",), *((),) * (len(shape) - 1))
                      for s, shape in zip(problem.specs, problem.shapes, strict=True))  # fmt: skip
        assert problem.evaluate((("a", 8),), specs, {}).flops > 0
        return search.Answer((("a", 8),), specs, ("rows",) * len(specs), "rows everywhere", runner_up="none")

    search.register("rows", rows)
    try:
        sharded = shardfn.shard(two_layers, search_mode="rows")
        args = PROGRAMS["two layers"][1].values()
        made = sharded.plan(*args)
        np.testing.assert_allclose(sharded(*args), two_layers(*args), rtol=1e-4, atol=1e-5)
        shardfn.mindspore.set_auto_parallel_context(search_mode="rows")
        assert shardfn.plan(two_layers, *args).policy == "rows everywhere"
        shardfn.mindspore.reset_auto_parallel_context()
        with pytest.raises(ContextError, match="'rows'"):
            search.register("rows", rows)
    finally:
        shardfn.mindspore.reset_auto_parallel_context()
        search.forget("rows")
    assert seen[0].names == ("x", "w1", "w2") and seen[0].devices == 8
    assert [d.strategy for d in made.inputs] == [(8, 1)] * 3
    assert {d.reason for d in made.inputs} == {"rows"}
    with pytest.raises(ContextError, match="search_mode 'rows' is unknown"):
        shardfn.plan(two_layers, *args, search_mode="rows")


def test_registered_search_that_returns_no_answer_is_refused():
    search.register("nothing", lambda problem: None)
    try:
        with pytest.raises(ContextTypeError, match="the search 'nothing' returned None"):
            shardfn.plan(two_layers, *PROGRAMS["two layers"][1].values(), search_mode="nothing")
    finally:
        search.forget("nothing")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (search.Answer((("a", 8),), (((), ()),) * 3, ("",) * 3, "mine"), "by an entry"),
        (search.Answer((("a", 8),), ((("a",), ()),), ("",), "mine"), "1 shardings for 3 arguments"),
        (search.Answer((("a", 8),), ((("a",), ()),) * 3, ("",), "mine"), "1 reasons for 3 arguments"),
        (search.Answer((("a", 5),), ((("a",), ()),) * 3, ("",) * 3, "mine"), "that of the entries"),
        (search.Answer((("a", 8),), ((("a",), ()), (None,), ((), ())), ("",) * 3, "mine"), "one tuple of axes"),
    ],
)
def test_answer_of_a_registered_search_that_does_not_fit_is_refused(answer, why):
    """Entries are never overruled."""
    search.register("wrong", lambda problem: answer)
    try:
        args = PROGRAMS["two layers"][1].values()
        with pytest.raises(StrategyError, match=why):
            shardfn.plan(two_layers, *args, search_mode="wrong", in_strategy=((8, 1), AUTO, AUTO))
    finally:
        search.forget("wrong")


def test_registered_search_may_return_what_a_built_in_one_finds():
    for mode in ("sharding_propagation", "auto"):
        search.register("mine", search.MODES[mode])
        try:
            args = PROGRAMS["two layers"][1].values()
            options = {"in_strategy": ((2, 1), AUTO, AUTO)}
            own, known = (shardfn.plan(two_layers, *args, search_mode=m, **options) for m in ("mine", mode))
            assert [d.spec for d in own.inputs] == [d.spec for d in known.inputs]
        finally:
            search.forget("mine")


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: None, max])
def test_register_of_a_function_with_other_parameters_is_refused(function):
    with pytest.raises(ContextTypeError, match="cannot be called with one or two arguments"):
        search.register("mine", function)


def test_register_of_a_bad_name_is_refused():
    for name in ("auto", "no name", "", 3, None):
        with pytest.raises(ContextError, match="cannot be registered"):
            search.register(name, search.MODES["auto"])
    with pytest.raises(ContextTypeError, match="must be callable"):
        search.register("mine", "auto")
    for name in ("auto", "mine"):
        with pytest.raises(ContextError, match="no search was registered"):
            search.forget(name)
    assert tuple(search.MODES) == MODES


PLANS = """
import hashlib, jax.numpy as jnp
import shardfn
from examples.models import abstract, attention
from tests.search.problems import S, two_layers

for mode in ("auto", "recursive_programming", "sharding_propagation"):
    for level in (0, 1, 2):
        args = S((64, 64), jnp.float32), S((64, 256), jnp.float32), S((256, 64), jnp.float32)
        print(shardfn.plan(two_layers, *args, device="h100:8", level=level, search_mode=mode))
    function, args = abstract(attention.make)
    made = shardfn.plan(function, *args, device="tpu-v5e:2x4", level=2, search_mode=mode)
    print(made, [(c.kind, c.number, c.operands, c.results) for c in made.constraints], made.candidates)
"""


@pytest.mark.slow
def test_plans_of_two_processes_are_the_same():
    root = pathlib.Path(__file__).parent.parent.parent
    texts = set()
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", PLANS], env=env, cwd=root, capture_output=True, text=True, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1 and "two_layers" in texts.pop()


ALL_GIVEN = {"in_strategy": ((2, 1), (1, 1), (1, 1)), "level": 2}
WIDE = (S((4096, 1024), jnp.float32), S((1024, 4096), jnp.float32), S((4096, 1024), jnp.float32))


@pytest.mark.parametrize("mode", MODES[1:])
def test_named_mode_with_all_arguments_given_shards_the_ops_inside(mode):
    follows = shardfn.plan(two_layers, *WIDE, device="h100:8", in_strategy=ALL_GIVEN["in_strategy"])
    assert follows.policy == "every sharding was given" and not follows.constraints
    made = shardfn.plan(two_layers, *WIDE, device="h100:8", search_mode=mode, **ALL_GIVEN)
    assert [(d.strategy, d.source) for d in made.inputs] == [(c, "you") for c in ALL_GIVEN["in_strategy"]]
    share = follows.cost.flops / 4  # and a little for what adds up the parts of a product
    assert made.cost.flops == pytest.approx(share, rel=1e-3), "all eight work, where two groups of four did the same"
    assert made.cost.time_s < follows.cost.time_s
    assert made.constraints and not made.policy.startswith("nothing")
    with shardfn.mindspore.auto_parallel(search_mode=mode):
        assert shardfn.plan(two_layers, *WIDE, device="h100:8", **ALL_GIVEN) == made
    sharded, args = shardfn.shard(two_layers, search_mode=mode, **ALL_GIVEN), PROGRAMS["two layers"][1].values()
    np.testing.assert_allclose(sharded(*args), two_layers(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", [0, 1])
def test_named_mode_with_all_arguments_given_keeps_a_given_result(level):
    options = ALL_GIVEN | {"level": level, "out_strategy": ((1, 4),), "device": "h100:8"}
    made = shardfn.plan(two_layers, *WIDE, search_mode="dynamic_programming", **options)
    assert [d.strategy for d in (*made.inputs, *made.outputs)] == [(2, 1), (1, 1), (1, 1), (1, 4)]


@pytest.mark.parametrize("options", [{"search_mode": "auto"}, {}])
def test_all_arguments_given_propagates_and_says_what_a_search_saves(options):
    made = shardfn.plan(two_layers, *WIDE, device="h100:8", in_strategy=ALL_GIVEN["in_strategy"], **options)
    assert made.policy == "every sharding was given"
    assert "groups of 4 devices repeat the same work, 34.4 GFLOPs per device instead of 8.59 GFLOPs" in str(made)
    assert 'level="time" searches the operations inside' in str(made)


def test_note_on_repeated_work_counts_the_devices_along_unused_axes():
    def adam(params, moments, x):
        params, gradient = params, jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p) ** 2))(params)
        moments = [0.9 * m + 0.1 * gradient**k for k, m in enumerate(moments, 1)]
        return params - 0.1 * moments[0] / (jnp.sqrt(moments[1]) + 1e-8), moments

    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    for ways, says in ((8, ""), (2, "groups of 4 devices repeat the same work")):
        entries = shardfn.REPLICATED, shardfn.REPLICATED, (ways, 1)
        made = shardfn.plan(adam, w, [w, w], x, in_strategy=entries, device="h100:8")
        assert says in made.entries and bool(says) == bool(made.entries)


@pytest.mark.parametrize("level", ["communication", "memory", "time"])
def test_all_arguments_given_a_named_level_searches_inside(level):
    given = {"device": "h100:8", "in_strategy": ALL_GIVEN["in_strategy"]}
    follows = shardfn.plan(two_layers, *WIDE, **given)
    made = shardfn.plan(two_layers, *WIDE, level=level, **given)
    assert [d.strategy for d in made.inputs] == [*ALL_GIVEN["in_strategy"]]
    assert made.cost.flops == pytest.approx(follows.cost.flops / 4, rel=1e-3)
    assert (
        "inside, the batch is sharded 8 ways" in made.entries
        and "than if the ops followed the entries too" in made.entries
    )
    file = shardfn.plan(two_layers, *WIDE, device="h100:8", layout=follows, level=level)
    assert (file.cost, file.constraints) == (follows.cost, ()), "a layout file is taken as it is"


@pytest.mark.parametrize("level", ["communication", "time"])
def test_entries_that_a_search_does_not_follow_inside_are_in_the_headline(level):
    long = S((65536, 256), "float32"), S((256, 1024), "float32"), S((1024, 256), "float32")
    given = {"device": "tpu-v5e:8", "in_strategy": ((2, 1), (1, 4), (4, 1))}
    made = shardfn.plan(two_layers, *long, level=level, **given)
    assert made.kind == "FSDP over 4 × data parallel over 2"
    assert "inside, the batch is sharded 8 ways and weights are gathered (FSDP)" in str(made)
    followed = shardfn.plan(two_layers, *long, level=level, search_mode="sharding_propagation", **given)
    assert followed.kind == "tensor parallel over 4 × data parallel over 2" and not followed.entries
    saved = {"communication": f"{1 - made.cost.bytes_sent / followed.cost.bytes_sent:.0%} fewer bytes sent",
             "time": f"{1 - made.cost.time_s / followed.cost.time_s:.0%} less time"}  # fmt: skip
    assert saved[level] in made.entries


TABLE, ROWS, SQUARE = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in
                       [((4096, 64), "float32"), ((64,), "int32"), ((64, 64), "float32")])  # fmt: skip


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda table, rows: table[rows], (TABLE, ROWS)),
        (lambda x: x[::-1], (SQUARE,)),
        (lambda: jnp.arange(4096.0), ()),
        (lambda x: x.reshape(64, 64, 64) + 1, (TABLE,)),
        (lambda x: x, (SQUARE,)),
    ],
    ids=["look-up", "reversal", "arange", "reshape", "identity"],
)
def test_of_equal_plans_that_send_nothing_the_one_with_least_memory_is_taken(function, args, level):
    plan, least = (shardfn.plan(lambda *args: function(*args), *args, device="h100:8", level=n) for n in (level, 1))
    assert plan.cost.bytes_sent == least.cost.bytes_sent == 0
    is_faster = level == 2 and plan.cost.time_s < least.cost.time_s  # one that shards the rows, and not the table
    assert plan.cost.memory.peak == least.cost.memory.peak or is_faster
