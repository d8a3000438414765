"""Which collectives travel together: the arithmetic of buckets, and the number of collectives in what is compiled."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import train
from shardfn.compiled.targets import devices, target
from shardfn.cost.devices.hardware import resolve
from shardfn.errors import ContextError, ContextTypeError, StrategyError, StrategyTypeError
from shardfn.frontend import defaults
from shardfn.mindspore import context
from shardfn.train.collectives import (
    KINDS,
    BucketMember,
    FusionOptions,
    FusionRule,
    buckets,
    compiler_options,
    fusion_of,
    ignored_fusion,
)
from tests.marks import some_slow

MB = 2**20


def rules(mode, config, ids=()):
    return FusionOptions(dict.fromkeys(KINDS.values(), FusionRule(mode, config)), dict(ids))


def tensors(*sizes, dtype="float32", kind="all-reduce"):
    return [BucketMember(f"w{i}", (n,), dtype, kind, ("data",)) for i, n in enumerate(sizes)]


def members(*args):
    return [b.members for b in buckets(*args)]


@pytest.mark.parametrize(
    ("ends", "count", "sizes"),
    [
        ((20, 35), 50, [21, 15, 14]),  # each index is the last of its bucket, not the first of the next
        ((20, 35), 36, [21, 15]),
        ((20, 35), 10, [10]),  # indices past the end say nothing
        ((0,), 3, [1, 2]),
    ],
)
def test_index(ends, count, sizes):
    found = members(tensors(*[8] * count), rules("index", ends))
    assert [len(m) for m in found] == sizes
    assert [i for m in found for i in m] == list(range(count))


@pytest.mark.parametrize(
    ("mb", "sizes", "dtype", "expected"),
    [
        (1, [MB // 8, MB // 8, MB // 8], "float32", [(0, 1), (2,)]),
        (1, [MB // 8, MB // 8, MB // 8, MB // 8], "bfloat16", [(0, 1, 2, 3)]),  # two bytes are charged, not four
        (1, [MB, 1, 1], "float32", [(0,), (1, 2)]),  # too large for any bucket
        (1, [MB // 4, 1], "float32", [(0,), (1,)]),  # the one that fills a bucket is charged
        (0, [1, 1], "float32", [(0,), (1,)]),
    ],
)
def test_size(mb, sizes, dtype, expected):
    assert members(tensors(*sizes, dtype=dtype), rules("size", mb)) == expected


def test_only_like_goes_with_like():
    mixed = [
        BucketMember("a", (2,), "float32", "all-reduce", ("data",)),
        BucketMember("b", (2,), "bfloat16", "all-reduce", ("data",)),
        BucketMember("c", (2,), "float32", "reduce-scatter", ("data",)),
        BucketMember("d", (2,), "float32", "all-reduce", ("replica", "data")),
        BucketMember("e", (2,), "float32", "all-reduce", ("data",)),
    ]
    assert members(mixed, rules("size", 64)) == [(0, 4), (1,), (2,), (3,)]
    assert members(mixed, rules("size", 64, (("*", 7),))) == [(0, 4), (1,), (2,), (3,)]


def test_numbers_by_path():
    five = tensors(1, 1, 1, 1, 1)
    assert members(five, rules("size", 64, (("w[0-3]", 1), ("w1", 0), ("w2", 2)))) == [(0, 3), (1,), (2,), (4,)]
    assert members(five, rules("off", None, (("w[34]", 1),))) == [(0,), (1,), (2,), (3, 4)]


@hypothesis.given(
    st.lists(
        st.tuples(st.integers(1, MB), st.sampled_from(["float32", "bfloat16"]), st.sampled_from(list(KINDS.values())))
    ),
    st.sampled_from([("size", 0), ("size", 1), ("size", 3), ("index", (2, 5)), ("off", None)]),
)
def test_each_in_one_bucket(asked, rule):
    given = [BucketMember(f"w{i}", (n,), dtype, kind, ("data",)) for i, (n, dtype, kind) in enumerate(asked)]
    made = buckets(given, rules(*rule))
    assert sorted(i for b in made for i in b.members) == list(range(len(given)))
    for bucket in made:
        assert {(given[i].kind, given[i].dtype) for i in bucket.members} == {(bucket.kind, bucket.dtype)}
        assert bucket.nbytes == sum(given[i].nbytes for i in bucket.members)
        if rule[0] == "size" and len(bucket.members) > 1:
            assert bucket.nbytes <= rule[1] * MB


def test_read_from_the_context():
    assert fusion_of(defaults.current().training) is None
    with context.auto_parallel(all_reduce_fusion_config=[3, 7]):
        assert context.get_auto_parallel_context("all_reduce_fusion_config") == [3, 7]
        assert fusion_of(defaults.current().training).rules["all-reduce"] == FusionRule("index", (3, 7))
        with context.auto_parallel(comm_fusion={"allreduce": {"mode": "size", "config": 3}}):
            both = defaults.current().training
    with pytest.raises(ContextError, match="two settings fuse all-reduces"):
        fusion_of(both)
    with context.auto_parallel(comm_fusion={"openstate": False, "allreduce": {"mode": "size", "config": 3}}):
        assert fusion_of(defaults.current().training) == rules("off", None)
    with context.auto_parallel(comm_fusion={}):
        assert fusion_of(defaults.current().training) == rules("size", 64)


EVERY = ",".join(f"{device}{kind}-combiner" for device in ("", "cpu-", "gpu-") for kind in KINDS.values())


@pytest.mark.parametrize(
    ("rule", "platform", "explicit", "keys", "missed"),
    [
        (("size", 2), "gpu", "", {f"xla_gpu_{k}_combine_threshold_bytes": 2 * MB for k in ("all_reduce", "all_gather", "reduce_scatter")}, []),
        (("size", 2), "tpu", "", {"xla_jf_crs_combiner_threshold_in_bytes": 2 * MB}, ["all-gather by size", "reduce-scatter by size"]),
        (("size", 2), "cpu", "", {}, ["all-reduce by size", "all-gather by size", "reduce-scatter by size"]),
        (("index", (1,)), "gpu", "", {}, ["all-reduce by index", "all-gather by index", "reduce-scatter by index"]),
        (("size", 2), "gpu", "all-reduce", {"xla_disable_hlo_passes": "all-reduce-combiner,cpu-all-reduce-combiner,gpu-all-reduce-combiner"}
         | {f"xla_gpu_{k}_combine_threshold_bytes": 2 * MB for k in ("all_gather", "reduce_scatter")}, []),
        (("size", 2), "cpu", "all-reduce all-gather reduce-scatter", {"xla_disable_hlo_passes": EVERY}, []),
        (("off", None), "tpu", "", {"xla_disable_hlo_passes": EVERY}, []),
    ],
)  # fmt: skip
def test_what_xla_is_told(rule, platform, explicit, keys, missed):
    assert compiler_options(rules(*rule), platform, explicit.split()) == keys
    assert ignored_fusion(rules(*rule), platform, explicit.split()) == missed


# ---- what is compiled

LAYERS = 4
RNG = np.random.default_rng(0)
PARAMS = {
    f"l{i}": {"b": np.zeros(16, np.float32), "w": RNG.normal(size=(16, 16)).astype(np.float32)} for i in range(LAYERS)
}
BATCH = RNG.normal(size=(2, 16, 16)).astype(np.float32)
ZERO = {"parallel_optimizer_threshold": 0}


def loss(params, x, y):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - y) ** 2)


def counts(text):
    kinds = KINDS.values()
    return tuple(len(re.findall(rf"[ )}}]{kind}(?:-start)?\(", text)) for kind in kinds)


def trained(**options):
    step = train.step(loss, optax.adam(1e-2), **{"mode": "data_parallel", **options})
    state = step.init(PARAMS, *BATCH)
    lowered = step.lower(state, *BATCH)
    for _ in range(2):
        state, value = step(state, *BATCH)
    return step, lowered, state, value


@pytest.fixture(scope="module")
def expected():
    *_, state, value = trained(mode="stand_alone")
    return state, value


CASES = {  # options: (all-reduces, all-gathers, reduce-scatters) of the compiled module
    "index": (dict(all_reduce_fusion_config=[2, 4]), (3, 0, 0)),
    "index, as a mode": (dict(comm_fusion={"allreduce": {"mode": "index", "config": [2, 4]}}), (3, 0, 0)),
    "size": (dict(comm_fusion={"allreduce": {"mode": "size", "config": 0}}), (8, 0, 0)),
    "gathers, one each": (
        dict(comm_fusion={"allgather": {"mode": "size", "config": 0}}, parallel_optimizer_config=ZERO), (1, 8, 0),
    ),
    "one each": (dict(comm_fusion={"openstate": False}), (8, 0, 0)),
    "auto": (dict(comm_fusion={}), (1, 0, 0)),
    "numbers": (dict(fusion={"*/w": 1, "l0/b": 0}), (3, 0, 0)),
    "a path goes before a glob": (dict(fusion={"l0/b": 0, "*": 1}), (2, 0, 0)),
    "level 1": (dict(fusion={"l[01]/*": 1}, parallel_optimizer_config=ZERO), (2, 2, 0)),
    "level 2": (
        dict(comm_fusion={"reducescatter": {"mode": "size", "config": 0}}, parallel_optimizer_config={**ZERO, "optimizer_level": "level2"}),
        (1, 1, 8),
    ),
    "level 3, groups": (
        dict(fusion={"*/w": 1}, parallel_optimizer_config={**ZERO, "optimizer_level": "level3", "optimizer_weight_shard_size": 4}),
        (3, 2, 2),
    ),
    "pieces of sums": (
        dict(comm_fusion={}, micro_batches=2, parallel_optimizer_config={"parallel_optimizer_threshold": 0, "optimizer_level": "level2", "gradient_accumulation_shard": True}),
        (1, 1, 1),
    ),
    "cross batch": (dict(mode="semi_auto_parallel", cross_batch=True, all_reduce_fusion_config=[3]), (2, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow([*CASES], {"size", "level 1", "pieces of sums", "cross batch"}))
def test_so_many_collectives_and_the_same_results(name, expected):
    options, asked = CASES[name]
    step, lowered, state, value = trained(**options)
    assert counts(lowered.compile().as_text()) == asked
    made = [bucket.kind for bucket, _ in step.buckets(state, *BATCH)]
    assert made.count("all-gather") == asked[1] and made.count("reduce-scatter") == asked[2]
    np.testing.assert_allclose(value, expected[1], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), state.params, expected[0].params)


# ---- beside the axes that are XLA's

WIDE = {
    f"l{i}": {"b": np.zeros(32, np.float32), "down": RNG.normal(size=(32, 16)).astype(np.float32) * 0.2,
              "up": RNG.normal(size=(16, 32)).astype(np.float32) * 0.2} for i in range(LAYERS)
}  # fmt: skip
CUT = {"*/b": (2,), "*/up": (1, 2), "*/down": (2, 1)}


def residual(params, x, y):
    for layer in params.values():
        x = x + jnp.tanh(x @ layer["up"] + layer["b"]) @ layer["down"]
    return jnp.mean((x - y) ** 2)


@functools.cache
def on_a_grid(name):
    options = dict(mode="semi_auto_parallel", cross_batch=True, in_strategy=((4, 1), (4, 1)), parameter_plan=CUT)
    options = dict(mode="stand_alone") if name == "one device" else {**options, **BESIDE[name][0]}
    step = train.step(residual, optax.adam(1e-2), **options)
    state = step.init(WIDE, *BATCH)
    text = step.lower(state, *BATCH).compile().as_text()
    made = step.buckets(state, *BATCH)
    for _ in range(2):
        state, value = step(state, *BATCH)
    return text, made, state, value


OWN = 2 * LAYERS - 1  # XLA's: of each layer one forwards, and one backwards but for the first
BESIDE = {
    "auto": (dict(comm_fusion={}), 1),
    "index": (dict(all_reduce_fusion_config=[3, 7]), 3),
    "numbers": (dict(fusion={"*/up": 1}), 2),
    "one each": (dict(comm_fusion={"openstate": False}), 3 * LAYERS),
    "micro-batches": (dict(fusion={"*/up": 1}, micro_batches=2), 2),
}


@pytest.mark.parametrize("name", some_slow([*BESIDE], {"auto", "one each", "micro-batches"}))
def test_beside_tensor_parallel(name):
    """Each device puts its pieces together: so many all-reduces, and nothing is gathered."""
    text, made, state, value = on_a_grid(name)
    assert counts(text) == (OWN + BESIDE[name][1], 0, 0)
    assert sum(bucket.nbytes for bucket, _ in made) == LAYERS * (32 + 2 * 16 * 32) * 4 // 2
    _, _, expected, wanted = on_a_grid("one device")
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), state.params, expected.params)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowered_for_machines_that_are_not_here(platform):
    step = train.step(loss, optax.sgd(1e-2), mode="data_parallel", all_reduce_fusion_config=[2, 4])
    state = step.init(PARAMS)
    inner = jax.jit(lambda state, *batch: step(state, *batch))
    text = inner.trace(state, *BATCH).lower(lowering_platforms=(platform,)).as_text()
    assert text.count('"stablehlo.all_reduce"') == 3
    assert text.count("optimization_barrier") == 2  # XLA's combiners cannot join what waits for each other


TPU_CASES = {  # options: collectives of any kind; of arrays this small the TPU's compiler makes all-reduces of every kind
    "index": (dict(all_reduce_fusion_config=[2, 4]), 3),
    "one each": (dict(comm_fusion={"openstate": False}), 8),
    "auto": (dict(comm_fusion={}), 1),
    "level 2": (CASES["level 2"][0], 10),
}


@pytest.fixture(scope="module")
def tpus():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)


def on(devices, function, params, **options):
    """Collectives of each kind, as compiled for devices that are not here."""
    step = train.step(function, optax.adam(1e-2), device=devices, **options)
    batch = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in BATCH]
    state = jax.eval_shape(lambda: step.init(params, *batch))
    return counts(step.lower(state, *batch).compile().as_text())


@pytest.mark.tpu
@pytest.mark.parametrize("name", TPU_CASES)
def test_so_many_on_tpus(name, tpus):
    options, asked = TPU_CASES[name]
    assert sum(on(tpus, loss, PARAMS, mode="data_parallel", **options)) == asked


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["index", "one each"])
def test_so_many_on_tpus_beside_tensor_parallel(name, tpus):
    options, asked = BESIDE[name]
    grid = dict(mode="semi_auto_parallel", cross_batch=True, in_strategy=((4, 1), (4, 1)), parameter_plan=CUT)
    assert sum(on(tpus, residual, WIDE, **grid, **options)) == OWN + asked


@pytest.fixture(scope="module")
def gpus(cuda):
    return devices(target(resolve("h100:8")))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["index", "size", "gathers, one each", "auto", "level 2", "pieces of sums"])
def test_as_many_on_gpus_as_here(name, gpus):
    options, asked = CASES[name]
    assert on(gpus, loss, PARAMS, mode="data_parallel", **options) == asked


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "asked"), [(1, 13), (64, 1)])
def test_the_combiners_of_gpus_are_told_the_size(size, asked, gpus):
    """Six gradients of 1 MiB, that XLA's partitioner sums: one all-reduce each, with those of the biases and the loss."""
    wide = {f"l{i}": {"w": jax.ShapeDtypeStruct((512, 512), "float32"), "b": jax.ShapeDtypeStruct((512,), "float32")}
            for i in range(6)}  # fmt: skip

    def narrow(params, x, y):
        x = jnp.pad(x, ((0, 0), (0, 496)))
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x[:, :16] - y) ** 2)

    found = on(gpus, narrow, wide, mode="semi_auto_parallel", in_strategy=((8, 1), (8, 1)),
               comm_fusion={"allreduce": {"mode": "size", "config": size}})  # fmt: skip
    assert found == (asked, 0, 0)


@pytest.mark.gpu
def test_one_gpu_sends_nothing(gpus, recwarn):
    assert on(gpus[:1], loss, PARAMS, mode="data_parallel", all_reduce_fusion_config=[2, 4]) == (0, 0, 0)
    assert not [w for w in recwarn if "fusion has no effect" in str(w.message)]


def test_inside_another_jit(expected):
    step = train.step(loss, optax.adam(1e-2), mode="data_parallel", fusion={"*/w": 1})
    state = step.init(PARAMS)
    twice = jax.jit(lambda state: step(step(state, *BATCH)[0], *BATCH))
    np.testing.assert_allclose(twice(state)[1], expected[1], rtol=1e-5)


def test_16_bits_travel_as_they_are_summed():
    for wide, dtype, nbytes in ((True, "float32", 4), (False, "bfloat16", 2)):
        step = train.step(loss, optax.sgd(1e-2), mode="data_parallel", comm_fusion={}, compute_dtype=jnp.bfloat16,
                          gradient_fp32_sync=wide)  # fmt: skip
        ((bucket, paths),) = step.buckets(step.init(PARAMS), *BATCH)
        assert (bucket.dtype, bucket.nbytes) == (dtype, LAYERS * (16 * 16 + 16) * nbytes)
        assert paths[:2] == ("l0/b", "l0/w")


def test_where_xla_makes_the_collectives_it_says_so():
    step = train.step(
        loss, optax.sgd(1e-2), mode="semi_auto_parallel", comm_fusion={"allreduce": {"mode": "size", "config": 1}}
    )
    with pytest.warns(UserWarning, match=r"no effect on all-reduce by size: in mode 'semi_auto_parallel'.*cross_batch"):
        step.init(PARAMS, *BATCH)
    _, lowered, *_ = trained(mode="semi_auto_parallel", comm_fusion={"openstate": False})
    assert counts(lowered.compile().as_text())[0] >= 2 * LAYERS


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (dict(fusion={"l0/*": -1}), StrategyError, "`fusion['l0/*']` cannot be -1"),
        (dict(fusion={"l0/*": True}), StrategyTypeError, "`fusion['l0/*']` cannot be True"),
        (dict(fusion=3), StrategyTypeError, "`fusion` must be a dict of paths to numbers"),
        (dict(fusion={"nowhere": 1}), StrategyError, "fusion 'nowhere' matches no trained parameter"),
        (dict(comm_fusion={"alltoall": {}}), ContextError, "`comm_fusion` has no entry 'alltoall'"),
        (dict(all_reduce_fusion_config=[5, 2]), ContextError, "each larger than the one before"),
        (dict(all_reduce_fusion_config=[1.0]), ContextTypeError, "its type is float, not int"),
    ],
)
def test_errors(options, kind, text):
    with pytest.raises(kind) as error:
        trained(**options)
    assert text in str(error.value)


@pytest.mark.parametrize("kind", ["psum", "all_gather"])
def test_fused_collective_of_ones_own_is_one_for_each_dtype(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tree = {"a": jnp.arange(32.0).reshape(8, 4), "b": jnp.arange(16.0).reshape(16), "c": jnp.arange(8)}
    fused, plain = (train.fused_psum, jax.lax.psum) if kind == "psum" else (
        train.fused_all_gather, lambda tree, x: jax.lax.all_gather(tree, x, tiled=True))  # fmt: skip

    def over(collective):
        spec = jax.sharding.PartitionSpec
        return jax.jit(
            jax.shard_map(
                lambda t: collective(t, "x"), mesh=mesh, in_specs=spec("x"), out_specs=spec(), check_vma=False
            )
        )

    jax.tree.map(np.testing.assert_array_equal, over(fused)(tree), over(plain)(tree))
    name = "all_reduce" if kind == "psum" else "all_gather"
    assert over(fused).lower(tree).as_text().count(f'"stablehlo.{name}"') == 2


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_one_operator_in_a_shard_map_sees_each_devices_part_of_the_batch(mode):
    """MindSpore's `cross_batch` of one operator: the others see the global batch."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    own_mean = jax.shard_map(lambda x: x - x.mean(0), mesh=mesh, in_specs=spec, out_specs=spec)
    x, w = np.random.default_rng(0).normal(size=(16, 4)).astype("f"), {"w": jnp.eye(4)}

    def loss(params, x):
        y = x @ params["w"]
        return jnp.mean(own_mean(y) ** 2) + jnp.mean((y - y.mean(0)) ** 2)

    step = train.step(loss, optax.sgd(0.1), mode=mode, in_strategy=((8, 1),), device=mesh)
    _, found = step(step.init(w, x), x)
    parts = x.reshape(8, 2, 4) - x.reshape(8, 2, 4).mean(1, keepdims=True)
    assert float(found) == pytest.approx(float((parts**2).mean() + ((x - x.mean(0)) ** 2).mean()), rel=1e-5)
