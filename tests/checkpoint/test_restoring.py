import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import checkpoint
from shardfn.checkpoint import arrays
from shardfn.errors import CheckpointError, ShardError
from tests.checkpoint.states import mesh, plain, same, training
from tests.messages import refusal

LAYOUT = """
format = "shardfn-layout"
version = 2
others = "replicated"
[mesh]
x = 2
y = 4
[arguments]
"params/w1" = ["y", "x"]
"*/mu/w1" = [["x", "y"], 1]
"""


@pytest.fixture(scope="module")
def state():
    return training()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("run")
    checkpoint.save(path, state)
    return path


def targets():
    four, eight = jax.devices()[4:], jax.devices()
    yield "as it was", None
    yield "device", eight[3]
    yield "name", "cpu"
    yield "devices", four
    yield "mesh of other sizes", mesh(4, 2)
    yield "mesh of one axis", mesh(8, names="b")
    yield "fewer devices", mesh(1, 2, devices=four)
    yield "mesh of other order", mesh(2, 4, devices=eight[::-1])
    yield "sharding", NamedSharding(mesh(2, 4), P())
    yield "host memory", NamedSharding(mesh(2, 4), P(), memory_kind="pinned_host")
    yield "tree", {"params": NamedSharding(mesh(2), P()), "": NamedSharding(mesh(1), P())}


@pytest.mark.parametrize("name", [name for name, _ in targets()])
def test_into_any_layout(saved, state, name):
    target = dict(targets())[name]
    back = checkpoint.restore(saved, target, like=state)
    same(back, state)
    same(checkpoint.restore(saved, target)["params"], state["params"])
    w1 = back["params"]["w1"]
    if isinstance(target, jax.sharding.Sharding):
        assert w1.sharding.is_equivalent_to(target, 2) and w1.sharding.memory_kind == target.memory_kind
    if name == "mesh of other sizes":
        assert w1.sharding.shard_shape(w1.shape) == (64, 64)
    if name == "devices":
        assert w1.sharding.device_set == set(target)


def test_into_a_layout_file(saved, state, tmp_path):
    file = tmp_path / "layout.toml"
    file.write_text(LAYOUT)
    back = checkpoint.restore(saved, file, like=state)
    same(back, state)
    assert back["params"]["w1"].sharding.shard_shape((64, 128)) == (16, 64)
    assert back["opt"][0].mu["w1"].sharding.shard_shape((64, 128)) == (8, 128)
    assert back["params"]["w2"].sharding.is_fully_replicated


def test_into_a_plan(tmp_path):
    params = {"w1": jnp.ones((32, 64)), "w2": jnp.ones((64, 8))}
    opt = optax.adam(1e-3)
    state = {"params": params, "opt": opt.init(params), "step": 3}

    def step(params, opt_state, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["w1"]) @ p["w2"]))(params)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    cuts = {"params/w1": (1, 4), "params/w2": (4, 1)}
    made = shardfn.plan(step, params, state["opt"], jnp.ones((16, 32)), in_strategy=(shardfn.AUTO, None, (2, 1)),
                        parameter_plan=cuts, search_mode="sharding_propagation")  # fmt: skip
    checkpoint.save(tmp_path, state, made)
    assert '"params/w1"' in (tmp_path / "0/layout/layout.toml").read_text()
    back = checkpoint.restore(tmp_path, made, like=state)
    same(back, state)
    assert back["params"]["w1"].sharding.is_equivalent_to(made.in_shardings[0]["w1"], 2)
    # A plan that speaks of the parameters alone: a parameter's moments lie where it does.
    forward = shardfn.plan(lambda params, x: x @ params["w1"] @ params["w2"], params, jnp.ones((16, 32)),
                           in_strategy=(shardfn.AUTO, (2, 1)), parameter_plan=cuts)  # fmt: skip
    back = checkpoint.restore(tmp_path, forward, like=state)
    assert back["opt"][0].mu["w1"].sharding.shard_shape((32, 64)) == (32, 16)
    bare = checkpoint.restore(tmp_path, forward, only=["w1", "w2"], name_map={"params": ""})
    assert bare["w2"].sharding.shard_shape((64, 8)) == (16, 8)


def test_reads_what_it_needs(saved, state, tmp_path):
    big = {"w": jax.device_put(np.random.default_rng(0).normal(size=(1024, 2048)).astype("float32"),
                               NamedSharding(mesh(8), P("a")))}  # fmt: skip
    checkpoint.save(tmp_path, big)
    one = NamedSharding(mesh(1), P())
    for target in (mesh(8), mesh(2), NamedSharding(mesh(8), P(None, "a")), NamedSharding(mesh(2, 4), P("a", "b")), one):
        told = checkpoint.reads(tmp_path, target)
        assert told.total == 8 << 20
        for device, needed in told.needed.items():
            assert told.read[device] <= 1.1 * needed, device
    # The half of it, as counted at the file system: random floats hardly pack.
    half = {"w": jax.ShapeDtypeStruct((1024, 2048), "float32", sharding=NamedSharding(mesh(1), P()))}
    before = arrays.bytes_read()
    checkpoint.restore(tmp_path, like=half)
    everything = arrays.bytes_read() - before
    before = arrays.bytes_read()
    checkpoint.restore(saved, only="params/w1")
    assert arrays.bytes_read() - before < 64 * 128 * 4 * 1.1 + 2000, "a partial restore reads a part"
    assert 7 << 20 < everything < 9 << 20
    assert "needed B" in str(checkpoint.reads(tmp_path))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16", jnp.float32])
def test_casts(saved, state, dtype):
    back = checkpoint.restore(saved, dtype=dtype, only=["params/*", "opt/*"])
    for old, new in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(back["params"]), strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old.astype(dtype)))
    assert back["opt"][0]["count"].dtype == "int32", "counts are not cast"


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float4_e2m1fn", "float8_e4m3", "uint4", "uint2"])
def test_casts_to_dtypes_that_no_file_has(tmp_path, dtype):
    of = "uint8" if dtype.startswith("uint") else "float32"
    checkpoint.save(tmp_path / "run", {"x": jnp.ones((4, 2), of)})
    found = [checkpoint.restore(tmp_path / "run", like={"x": jnp.zeros((4, 2), dtype)})]
    if of == "float32":
        found.append(checkpoint.restore(tmp_path / "run", dtype=dtype))
    for back in found:
        same(back, {"x": jnp.ones((4, 2), dtype)})
    if dtype == "float8_e4m3":
        with pytest.raises(CheckpointError, match="`x` has the dtype float8_e4m3"):
            checkpoint.relayout(tmp_path / "run", tmp_path / "copy", None, dtype=dtype)


def test_numbers_keep_their_values_where_arrays_are_cast(tmp_path):
    state = {"x": jnp.ones(2), "rate": 0.1, "host": np.full(2, 0.1), "n": 2**53 + 1}
    checkpoint.save(tmp_path, state)
    for dtype in (jnp.bfloat16, {"*": jnp.bfloat16}):
        back = checkpoint.restore(tmp_path, dtype=dtype)
        assert (back["rate"], back["n"]) == (0.1, 2**53 + 1)
        assert back["x"].dtype == back["host"].dtype == jnp.bfloat16
    assert checkpoint.restore(tmp_path, like={**state, "rate": jnp.bfloat16(0)})["rate"].dtype == jnp.bfloat16


def test_casts_by_path_and_by_like(saved, state):
    back = checkpoint.restore(saved, dtype={"params/w*": jnp.bfloat16})
    assert (back["params"]["w1"].dtype, back["params"]["half"].dtype) == ("bfloat16", "bfloat16")
    assert back["opt"][0]["mu"]["w1"].dtype == "float32"
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float16"), state["params"])
    back = checkpoint.restore(saved, mesh(8, names="b"), like={"params": like}, only="params/*")
    assert {leaf.dtype for leaf in jax.tree.leaves(back)} == {np.dtype("float16")}


@pytest.mark.parametrize("dtype", ["int8", {"w": "int32"}, {"n": "bfloat16"}, {"rate": "bfloat16"}], ids=str)
def test_casts_that_cannot_be_done_are_refused(tmp_path, dtype):
    checkpoint.save(tmp_path / "run", {"w": jnp.ones(2), "n": jnp.arange(2), "rate": 0.1})
    for call in (checkpoint.restore, functools.partial(checkpoint.merge, target=tmp_path / "copy")):
        with pytest.raises(CheckpointError, match="`dtype` cannot cast to"):
            call(tmp_path / "run", dtype=dtype)
    assert checkpoint.restore(tmp_path / "run", dtype={"n": "int32", "*": "bfloat16"})["w"].dtype == "bfloat16"


def test_a_part_keeps_the_rest_of_like(saved, state):
    zeros = jax.tree.map(jnp.zeros_like, state["params"])
    back = checkpoint.restore(saved, like={"params": zeros, "head": jnp.full(3, 5.0)}, only="params/w*")
    same(back["params"]["w1"], state["params"]["w1"])
    assert not np.asarray(back["params"]["half"]).any() and back["head"][0] == 5


def test_a_leaf_of_like_that_only_leaves_out_may_be_anything(tmp_path):
    checkpoint.save(tmp_path, {"w": jnp.ones(2)})
    apply = print
    back = checkpoint.restore(tmp_path, like={"s": "hello", "f": apply, "w": jnp.zeros(2)}, only="w")
    assert (back["s"], back["f"], back["w"][0]) == ("hello", apply, 1)
    with pytest.raises(CheckpointError, match="`s` is a str"):
        checkpoint.restore(tmp_path, like={"s": "hello", "w": jnp.zeros(2)})


def test_like_of_an_abstract_mesh(tmp_path):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    turned = jax.sharding.Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b"), axis_types=explicit)
    state = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(turned, P("a", "b"))), "y": jnp.ones(3)}
    checkpoint.save(tmp_path, state)
    like = jax.eval_shape(lambda state: jax.tree.map(jnp.sin, state), state)
    back = checkpoint.restore(tmp_path, like=like)
    assert back["w"].sharding.spec == P("a", "b") and list(back["w"].sharding.mesh.devices.flat) == jax.devices()
    with jax.set_mesh(turned):
        assert checkpoint.restore(tmp_path, like=like)["w"].sharding == state["w"].sharding
    few = jax.sharding.AbstractMesh((2, 2), ("a", "b"), axis_types=explicit)
    with pytest.raises(CheckpointError, match=r"(?s)the mesh of the target has no devices.*jax\.set_mesh"):
        checkpoint.restore(tmp_path, NamedSharding(few, P("a")), only="w")


def test_small_mistakes_have_their_fix(tmp_path):
    checkpoint.save(tmp_path, {"params": {"w": jnp.ones(2)}, "step": 1})
    with pytest.raises(CheckpointError, match=r"did you mean 'params/\*'\?"):
        checkpoint.restore(tmp_path, only="parms/*")
    with pytest.raises(CheckpointError, match="a checkpoint's path is empty"):
        checkpoint.restore("")


def test_renamed(saved, state):
    names = {"params/layers": "model/blocks", "params": "model", "params/w1": "embed"}
    back = checkpoint.restore(saved, only=["model/*", "embed"], name_map=names)
    assert set(back) == {"model", "embed"} and isinstance(back["model"]["blocks"], list)
    same(back["embed"], state["params"]["w1"])
    like = {"model": {"w2": state["params"]["w2"]}}
    same(checkpoint.restore(saved, like=like, only="model/w2", name_map=names), like)


LIKE = {"params": {"w1": jnp.zeros((2, 2)), "w_2": jnp.zeros((128, 64)), "half": jnp.zeros((16, 8), int)},
        "key": jnp.zeros(2, "uint32"), "step": 1}  # fmt: skip
CASES = [  # what is wrong, how often, and the options of the call
    ("there is no step 9", 1, {"step": 9}),
    ("cannot be restored into a float", 1, {"target": 3.5}),
    ("there is no tpu here", 1, {"target": "tpu"}),
    ("has none of the axes", 1, {"target": mesh(2, 4, names="xy")}),
    ("cannot have its target sharding", 2, {"target": NamedSharding(mesh(5), P("a")), "only": "params/w*"}),
    ("the tree has no sharding for", 2, {"target": {"params": NamedSharding(mesh(2), P())}, "only": ["step", "key"]}),
    ("two arrays would be `params/w2`", 2, {"name_map": {"parms": "x", "params/w1": "params/w2"}}),
    ("`step/x` would be inside `step`", 1, {"name_map": {"params/half": "step/x"}}),
    ("the target is empty", 1, {"target": []}),
    ("`only` matches no array", 1, {"only": ["parm/*", "params/*"]}),
    ("`dtype` matches no array", 1, {"dtype": {"nothing": "bfloat16"}}),
    ("'bfloat17' is not a dtype", 1, {"dtype": "bfloat17"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "count", "options"), CASES, ids=[text for text, *_ in CASES])
def test_restore_of_what_does_not_fit_is_refused(saved, text, count, options):
    error = refusal(lambda: checkpoint.restore(saved, **options))
    assert isinstance(error, CheckpointError) and text in error.problems[0].what and len(error.problems) == count


def test_restore_from_a_folder_without_a_checkpoint_is_refused(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        assert f"there is no checkpoint in {path}" in str(refusal(checkpoint.restore, path))


def test_message_of_leaves_that_do_not_fit_reads_as_the_golden_file(saved, golden):
    error = refusal(lambda: checkpoint.restore(saved, like=LIKE, only=["params/*", "key", "step"]))
    golden("messages_checkpoint_restore", str(error))


def test_a_lone_array_may_take_the_place_of_all(saved, state):
    back = checkpoint.restore(saved, only="params/w1", name_map={"params/w1": ""})
    np.testing.assert_array_equal(back, state["params"]["w1"])
    with pytest.raises(CheckpointError, match="would be inside"):
        checkpoint.restore(saved, only=["params/w1", "step"], name_map={"params/w1": ""})


def test_other_counts_of_devices_need_a_target(tmp_path):
    on = mesh(4)
    checkpoint.save(tmp_path, {"w": jax.device_put(jnp.arange(8.0), NamedSharding(on, P("a")))})
    with pytest.raises(CheckpointError, match="saved on 4 devices, and here are 8"):
        checkpoint.restore(tmp_path)
    same(checkpoint.restore(tmp_path, on), {"w": np.arange(8, dtype="float32")})


def test_a_layout_that_does_not_fit_says_so(saved, tmp_path):
    file = tmp_path / "layout.toml"
    file.write_text(LAYOUT.replace("y = 4", "y = 3"))
    with pytest.raises(ShardError, match="mesh"):
        checkpoint.restore(saved, file)


def test_sharded_training_goes_on(tmp_path):
    """A run of eight devices goes on on two, and comes to where it would have."""

    def step(params, x):
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    k1, k2, kx = jax.random.split(jax.random.key(0), 3)
    params = {"w1": jax.random.normal(k1, (16, 32)), "w2": jax.random.normal(k2, (32, 8))}
    x = jax.random.normal(kx, (8, 16))
    on_eight = shardfn.shard(step, ({"w1": (1, 4), "w2": (4, 1)}, (2, 1)))
    halfway = on_eight(on_eight(params, x), x)
    checkpoint.save(tmp_path, halfway, on_eight.plan(params, x))
    on_two = shardfn.shard(step, ({"w1": (2, 1), "w2": (1, 2)}, (1, 2)), device=jax.devices()[:2])
    back = checkpoint.restore(tmp_path, on_two.plan(params, x))
    assert back["w1"].sharding.device_set == set(jax.devices()[:2])
    one, two = on_eight(on_eight(halfway, x), x), on_two(on_two(back, x), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain(one), plain(two))


def test_a_typed_key_lies_as_its_plan_says(tmp_path):
    """Its numbers, which are stored, are no dim of it."""

    def draw(params, key, keys, x):
        return params * 2, jax.random.split(key)[0], keys, x @ params

    shape = jnp.ones((8, 4)), jax.random.key(3), jax.random.split(jax.random.key(0), 8), jnp.ones((2, 8))
    made = shardfn.plan(draw, *shape, in_strategy=((4, 1), None, (2,), (2, 1)))
    made.save(tmp_path / "made.toml")
    state = {"params": shape[0], "key": shape[1], "keys": shape[2]}
    checkpoint.save(tmp_path / "run", state, made)
    checkpoint.relayout(tmp_path / "run", tmp_path / "copy", layout=tmp_path / "made.toml")
    for path, target in (
        (tmp_path / "run", made),
        (tmp_path / "run", tmp_path / "made.toml"),
        (tmp_path / "copy", made),
    ):
        found = checkpoint.restore(path, target)
        assert found["keys"].sharding.shard_shape((8,)) == (4,)
        np.testing.assert_array_equal(jax.random.key_data(found["key"]), jax.random.key_data(shape[1]))


def test_integers_that_do_not_fit_are_refused(tmp_path):
    checkpoint.save(tmp_path, {"i": jnp.arange(300), "j": jnp.arange(100)})
    like = {name: jax.ShapeDtypeStruct((n,), "int8") for name, n in (("i", 300), ("j", 100))}
    with pytest.raises(CheckpointError, match="`i` has integers that int8 has not"):
        checkpoint.restore(tmp_path, like=like)
    assert checkpoint.restore(tmp_path, like=like, only="j")["j"].dtype == "int8"


@pytest.mark.parametrize(
    "like", [jnp.int32(0), np.int16(0), jax.ShapeDtypeStruct((), "uint8")], ids=["jax", "numpy", "shape"]
)
def test_a_number_is_an_array_where_like_has_one(tmp_path, like):
    checkpoint.save(tmp_path, {"n": 200, "rate": 0.25, "left": 7, "large": 2**40})
    back = checkpoint.restore(tmp_path, like={"n": like, "rate": jnp.float32(0), "left": 0}, only=["n", "rate", "left"])
    assert (back["n"].dtype, back["n"].shape, int(back["n"])) == (like.dtype, (), 200)
    assert back["rate"].dtype == "float32" and type(back["left"]) is int
    with pytest.raises(CheckpointError, match=f"`large` has integers that {like.dtype} has not"):
        checkpoint.restore(tmp_path, like={"large": like}, only="large")


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ("`name_map` is a list", {"name_map": ["enc"]}),
        ("`only` is an int", {"only": 3}),
        ("the target has a device twice", {"target": jax.devices()[:1] * 2}),
        ("there is no step 0.0", {"step": 0.0}),
        ("PRNG key of threefry2x32 in the checkpoint, and of rbg", {"like": {"key": jax.random.key(0, impl="rbg")}}),
    ],
)
def test_wrong_arguments_say_what_is_wrong(tmp_path, told, options):
    checkpoint.save(tmp_path, {"key": jax.random.key(1)})
    assert told in refusal(lambda: checkpoint.restore(tmp_path, **options)).problems[0].what


def test_a_shape_cannot_be_saved(tmp_path):
    error = refusal(checkpoint.save, tmp_path, {"a": jax.ShapeDtypeStruct((2,), "float32")})
    assert error.problems[0].what == "`a` is a shape, and no array"


def test_the_fix_of_arrays_that_like_has_not_is_a_call_that_works(tmp_path):
    names = ("body/w", "head/w", "n", "opt/mu", "opt/nu", "rate")
    checkpoint.save(tmp_path, {name: jnp.ones(2) for name in names})
    like = {"head": {"w": jnp.zeros(2)}, "n": jnp.zeros(2), "new": jnp.zeros(2)}
    problems = refusal(lambda: checkpoint.restore(tmp_path, like=like)).problems
    assert [p.what for p in problems if "only=" in p.fix and "no `new`" not in p.what] == [
        "the checkpoint has `body/w`, and `like` has not",
        "the checkpoint has 2 arrays in `opt`, and `like` has none there",
        "the checkpoint has `rate`, and `like` has not",
    ]
    for only in {p.fix.partition(": only=")[2] for p in problems} - {""}:
        same(
            checkpoint.restore(tmp_path, like=like, only=eval(only)),
            {**like, "head": {"w": jnp.ones(2)}, "n": jnp.ones(2)},
        )
    assert "only=[" not in str(refusal(lambda: checkpoint.restore(tmp_path, like={"new": jnp.zeros(2)})))


@pytest.mark.parametrize("inside", ["params", "model"])
def test_a_part_of_the_checkpoint_as_like_is_one_problem_with_what_works(inside, tmp_path):
    part = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
    checkpoint.save(tmp_path, {inside: part, "step": jnp.ones(())})
    with pytest.raises(CheckpointError, match=f"the arrays of `like` are in `{inside}`") as error:
        checkpoint.restore(tmp_path, like=part)
    (problem,) = error.value.problems
    found = eval(problem.fix, {"restore": checkpoint.restore, "path": tmp_path, "like": part})
    assert found.keys() == part.keys()


def test_what_a_plan_names_otherwise_is_found_by_the_end_of_its_path(tmp_path):
    def mlp(p, x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
    plan = shardfn.plan(mlp, params, jnp.ones((8, 8)), in_strategy=({"up": (1, 4), "down": (4, 1)}, (2, 1)))
    plan.save(tmp_path / "layout.toml")  # its arrays are `p/up` and `p/down`
    state = {"params": params, "opt": {"mu": params, "count": jnp.zeros((), int)}, "rows": jnp.ones(3), "n": 3}
    checkpoint.save(tmp_path / "run", state, plan)
    for target in (None, plan, tmp_path / "layout.toml"):
        only = ["params/*", "opt/mu/*"]
        back = checkpoint.restore(tmp_path / "run", target, only=only)
        assert back["params"]["up"].sharding.shard_shape((8, 16)) == (8, 4)
        assert back["opt"]["mu"]["down"].sharding.shard_shape((16, 8)) == (4, 8)
    back = checkpoint.restore(tmp_path / "run", name_map={"params": "model"})
    same(back["model"], params)
    assert back["model"]["up"].sharding.shard_shape((8, 16)) == (8, 4)
    assert len(back["rows"].sharding.device_set) == len(back["opt"]["count"].sharding.device_set) == 8
    assert len(checkpoint.restore(tmp_path / "run", only="params/up")["params"]["up"].sharding.device_set) == 8


def test_rules_of_one_end_that_differ_are_not_taken(tmp_path):
    text = LAYOUT.replace('others = "replicated"\n', "").replace('"*/mu/w1"', '"other/w1"')
    (tmp_path / "layout.toml").write_text(text)
    checkpoint.save(tmp_path / "run", {"model": {"w1": jnp.ones((8, 8))}})
    with pytest.raises(ShardError, match=r"no rule of .* matches `model/w1`"):
        checkpoint.restore(tmp_path / "run", tmp_path / "layout.toml")
