"""The usual mistakes of new users: each error has its type and names its mend, and the mend works as typed."""

import functools
import re
import sys
import types

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardfn import AUTO, DATA_PARALLEL, REPLICATED, explain, load_layout, plan, shard, train
from shardfn.errors import DeviceError
from tests.messages import refusal


def dense(x, w):
    return x @ w


def model(params, x):
    return x @ params["w"] + params["b"]


def keyed(x, *, w):
    return x @ w


def block(x, w, train):
    return jnp.tanh(x @ w) if train else x @ w


def rows(x, n):
    return x[:n]


def tiled(x, n):
    return x + jnp.zeros(n)


def two(x):
    return x, x.sum()


def loss(net, x):
    return (net(x) ** 2).mean()


def fitted(**options):
    """The plan of a training step of a module."""
    step = train.step(loss, optax.sgd(0.1), **options)
    net, x = nnx.Linear(16, 4, rngs=nnx.Rngs(0)), np.ones((8, 16), np.float32)
    return step.plan(step.init(net, x), x)


@functools.cache
def names():
    """What the rows below may use."""
    return {
        "AUTO": AUTO, "DATA_PARALLEL": DATA_PARALLEL, "REPLICATED": REPLICATED, "P": P, "jax": jax, "jnp": jnp, "np": np,
        "plan": plan, "shard": shard, "explain": explain, "load_layout": load_layout, "fitted": fitted,
        "dense": dense, "model": model, "keyed": keyed, "block": block, "rows": rows, "tiled": tiled, "two": two,
        "x": np.ones((8, 16), np.float32), "w": np.ones((16, 32), np.float32),
        "params": {"w": np.ones((16, 32), np.float32), "b": np.ones(32, np.float32)},
        "net": nnx.Linear(16, 4, rngs=nnx.Rngs(0)),
        "mesh": Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "mp")),
    }  # fmt: skip


# The mistake, the error, the mend as its text says it, and the call with the mend in it; None where the mend is no edit.
MISTAKES = {
    "entries": [
        ("axis names", "shard(dense, (('dp', None), None), device=mesh)(x, w)", "StrategyTypeError", "P('dp', None)",
         "shard(dense, (P('dp', None), None), device=mesh)(x, w)"),
        ("axis names for two dimensions", "shard(dense, ((('dp', 'mp'), None), None), device=mesh)(x, w)", "StrategyTypeError",
         "P(('dp', 'mp'), None)", "shard(dense, (P(('dp', 'mp'), None), None), device=mesh)(x, w)"),
        ("axis names and 1", "shard(dense, (('dp', 1), None), device=mesh)(x, w)", "StrategyTypeError", "P('dp', None)",
         "shard(dense, (P('dp', None), None), device=mesh)(x, w)"),
        ("a NumPy array", "shard(dense, (np.array([8, 1]), (1, 1)))(x, w)", "StrategyTypeError", "(8, 1)",
         "shard(dense, ((8, 1), (1, 1)))(x, w)"),
        ("a JAX array", "shard(dense, (jnp.array([2, 4]), (4, 1)))(x, w)", "StrategyTypeError", "(2, 4)",
         "shard(dense, ((2, 4), (4, 1)))(x, w)"),
        ("numbers as text", "shard(dense, ('4,1', None))(x, w)", "StrategyTypeError", "(4, 1)",
         "shard(dense, ((4, 1), None))(x, w)"),
        ("a tuple as text", "shard(dense, ('(4, 1)', '(1, 2)'))(x, w)", "StrategyTypeError", "(1, 2)",
         "shard(dense, ((4, 1), (1, 2)))(x, w)"),
        ("all of it as text", "shard(lambda x: x, '4,1')(x)", "StrategyTypeError", "in_strategy=((4, 1),)",
         "shard(lambda x: x, in_strategy=((4, 1),))(x)"),
        ("AUTO in quotes", "shard(dense, ('AUTO', (1, 4)))(x, w)", "StrategyTypeError", "AUTO",
         "shard(dense, (AUTO, (1, 4)))(x, w)"),
        ("auto for a dimension", "shard(dense, (('auto', 1), (1, 4)))(x, w)", "StrategyTypeError", "(AUTO, 1)",
         "shard(dense, ((AUTO, 1), (1, 4)))(x, w)"),
        ("replicated in quotes", "shard(dense, ('replicated', (1, 4)))(x, w)", "StrategyTypeError", "REPLICATED",
         "shard(dense, (REPLICATED, (1, 4)))(x, w)"),
        ("data parallel in quotes", "shard(dense, ('data-parallel', (1, 1)))(x, w)", "StrategyTypeError", "DATA_PARALLEL",
         "shard(dense, (DATA_PARALLEL, (1, 1)))(x, w)"),
        ("all of it auto", "shard(dense, 'auto')", "StrategyTypeError", "leave in_strategy out", "shard(dense)(x, w)"),
        ("out_strategy AUTO", "shard(dense, out_strategy=AUTO)", "StrategyTypeError", "out_strategy=(AUTO,)",
         "shard(dense, out_strategy=(AUTO,))(x, w)"),
        ("out_strategy in quotes", "shard(dense, None, ('AUTO',))(x, w)", "StrategyTypeError", "AUTO",
         "shard(dense, None, (AUTO,))(x, w)"),
        ("a dict by argument", "shard(dense, {'w': (1, 4), 'x': (2, 1)})", "StrategyTypeError",
         "in_strategy=((2, 1), (1, 4))", "shard(dense, in_strategy=((2, 1), (1, 4)))(x, w)"),
        ("a dict of one argument in another case", "shard(dense, {'W': (1, 4)})", "StrategyTypeError",
         "in_strategy=(AUTO, (1, 4))", "shard(dense, in_strategy=(AUTO, (1, 4)))(x, w)"),
        ("a dict by path", "shard(model, {'params/w': (1, 4), 'b': (4,)})", "StrategyTypeError",
         "parameter_plan={'params/w': (1, 4), 'b': (4,)}",
         "shard(model, parameter_plan={'params/w': (1, 4), 'b': (4,)})(params, x)"),
        ("a dict of results", "shard(lambda x: {'y': x}, None, {'y': (8, 1)})", "StrategyTypeError",
         "out_strategy=({'y': (8, 1)},)", "shard(lambda x: {'y': x}, out_strategy=({'y': (8, 1)},))(x)"),
        ("a keyword-only argument", "shard(keyed, ((2, 1), (1, 4)))(x, w=w)", "StrategyError",
         "in_strategy=((2, 1),), parameter_plan={'w': (1, 4)}",
         "shard(keyed, in_strategy=((2, 1),), parameter_plan={'w': (1, 4)})(x, w=w)"),
    ],
    "arguments": [
        ("shapes as tuples", "plan(dense, (8, 16), (16, 32))", "StrategyTypeError", "jax.ShapeDtypeStruct((8, 16), 'float32')",
         "plan(dense, jax.ShapeDtypeStruct((8, 16), 'float32'), jax.ShapeDtypeStruct((16, 32), 'float32'))"),
        ("a list of numbers", "shard(dense)([[1.0] * 16] * 8, w)", "StrategyTypeError", "jnp.asarray(x)",
         "shard(dense)(jnp.asarray(x), w)"),
        ("a list of numbers with an entry", "shard(lambda x: x, ((8,),))([1.0] * 8)", "StrategyTypeError", "jnp.asarray(x)",
         "shard(lambda x: x, ((8,),))(jnp.asarray(x)[:, 0])"),
        ("a switch", "plan(block, x, w, train=True)", "StrategyTypeError", "static_argnames='train'",
         "plan(block, x, w, train=True, static_argnames='train')"),
        ("a switch by position", "shard(block)(x, w, True)", "StrategyTypeError", "static_argnames='train'",
         "shard(block, static_argnames='train')(x, w, True)"),
        ("a slice", "shard(rows)(x, 4)", "StrategyTypeError", "static_argnames='n'", "shard(rows, static_argnames='n')(x, 4)"),
        ("a size", "shard(tiled)(x, 16)", "StrategyTypeError", "static_argnames='n'", "shard(tiled, static_argnames='n')(x, 16)"),
        ("options in the call", "shard(dense).plan(x, w, level=2)", "StrategyTypeError", "shard(dense, level=2)",
         "shard(dense, level=2).plan(x, w)"),
    ],
    "names of options": [
        ("in_strategies", "shard(dense, in_strategies=((2, 1), None))", "StrategyTypeError", "'in_strategy'?", None),
        ("the same in plan", "plan(dense, x, w, in_strategies=((2, 1), None))", "StrategyTypeError", "did you mean 'in_strategy'?",
         None),
        ("JAX's in_shardings", "shard(dense, in_shardings=None)", "StrategyTypeError", "did you mean 'in_strategy'?", None),
        ("JAX's out_shardings", "shard(dense, out_shardings=None)", "StrategyTypeError", "did you mean 'out_strategy'?", None),
        ("mesh", "shard(dense, mesh=mesh)", "StrategyTypeError", "did you mean 'device'?", "shard(dense, device=mesh).plan(x, w)"),
        ("devices", "shard(dense, devices=jax.devices())", "StrategyTypeError", "did you mean 'device'?",
         "shard(dense, device=jax.devices())(x, w)"),
        ("objective", "shard(dense, objective='time')", "StrategyTypeError", "did you mean 'level'?",
         "shard(dense, level='time')(x, w)"),
        ("memory", "plan(dense, x, w, memory='1GiB')", "StrategyTypeError", "did you mean 'memory_limit'?",
         "plan(dense, x, w, memory_limit='1GiB')"),
        ("JAX's option without its s", "shard(block, static_argnum=2)", "StrategyTypeError", "did you mean 'static_argnums' or 'static_argnames'?",
         "shard(block, static_argnums=2)(x, w, True)"),
        ("an objective in another case", "shard(dense, level='Time')", "StrategyTypeError", "'time'",
         "shard(dense, level='time')(x, w)"),
        ("an argument in another case", "shard(rows, static_argnames='N')", "StrategyError", "'n'",
         "shard(rows, static_argnames='n')(x, 4)"),
    ],
    "paths": [
        ("another case", "shard(dense, parameter_plan={'W': (1, 4)})(x, w)", "StrategyError", "'w'",
         "shard(dense, parameter_plan={'w': (1, 4)})(x, w)"),
        ("another case inside", "shard(model, parameter_plan={'Params/W': (1, 4)})(params, x)", "StrategyError", "'params/w'",
         "shard(model, parameter_plan={'params/w': (1, 4)})(params, x)"),
        ("a glob", "shard(model, parameter_plan={'*/W': (1, 4)})(params, x)", "StrategyError", "'*/w'",
         "shard(model, parameter_plan={'*/w': (1, 4)})(params, x)"),
        ("a part of a glob", "shard(model, parameter_plan={'param/*': REPLICATED})(params, x)", "StrategyError", "'params/*'",
         "shard(model, parameter_plan={'params/*': REPLICATED})(params, x)"),
        ("in decision", "plan(net, x).decision('kernal')", "StrategyError", "'kernel'",
         "plan(net, x).decision('kernel')"),
        ("in why", "plan(net, x).why('Kernal')", "StrategyError", "'kernel'", "plan(net, x).why('kernel')"),
        ("in what_if", "plan(net, x).what_if({'kernal': (1, 4)})", "StrategyError", "'kernel'",
         "plan(net, x).what_if({'kernel': (1, 4)})"),
        ("in a training step", "fitted(mode='semi_auto_parallel', parameter_plan={'Kernel': (1, 4)})", "StrategyError",
         "'kernel'", "fitted(mode='semi_auto_parallel', parameter_plan={'kernel': (1, 4)})"),
    ],
    "devices": [
        ("a count that no slice has", "plan(dense, x, w, device='tpu-v5e:17')", "DeviceError", '"tpu-v5e:16" or "tpu-v5e:32"',
         None),
        ("a count first", "plan(dense, x, w, device='8xh100')", "DeviceError", '"h100:8"', "plan(dense, x, w, device=\"h100:8\")"),
        *(
            (f"{name!r}", f"plan(dense, x, w, device={name!r})", "DeviceError", f'"{meant}"',
             f'plan(dense, x, w, device="{meant}")')
            for name, meant in (
                ("h100x8", "h100:8"), ("gpu:8", "h100:8"), ("gpu-8", "h100:8"), ("cuda:16", "h100:16"), ("cpu-8", "cpu:8"),
                ("cpu8", "cpu:8"), ("cpu:0", "cpu:8"), ("tpu-v6:8", "tpu-v6e:8"), ("a100:0", "a100:8"), ("a100-80:8", "a100:8"),
                ("tpuv5e:8", "tpu-v5e:8"), ("tpu_v5e:8", "tpu-v5e:8"), ("tpu:v5e:8", "tpu-v5e:8"), ("TPU:8", "tpu-v5e:8"),
                ("tpu-v5e:-1", "tpu-v5e:8"), ("h100:8.0", "h100:8"), ("h100:", "h100:8"), ("8 gpus", "h100:8"),
                ("tpu-v5e:17", "tpu-v5e:16"), ("tpu-v5litepod-17", "tpu-v5e:32"), ("tpu-v5e:4x4x4", "tpu-v5e:8x8"),
            )
        ),
        ("several machines", "plan(dense, x, w, device='a3-highgpu-8g:4')", "DeviceError", '"h100:32"',
         "plan(dense, x, w, device=\"h100:32\")"),
        ("cores or chips", "plan(dense, x, w, device='tpu-v5p-16')", "DeviceError", '"tpu-v5p:8"',
         "plan(dense, x, w, device=\"tpu-v5p:8\")"),
    ],
    "memory": [
        ("gibibytes without the unit", "plan(dense, x, w, memory_limit=2)", "StrategyError", 'memory_limit="2GiB"',
         'plan(dense, x, w, memory_limit="2GiB")'),
        ("half a unit", "shard(dense, memory_limit='2G')", "StrategyError", '"2GiB"', 'shard(dense, memory_limit="2GiB")(x, w)'),
        ("a fraction without the unit", "shard(dense, memory_limit=1.5)", "StrategyError", '"1.5GiB"',
         'shard(dense, memory_limit="1.5GiB")(x, w)'),
        ("less than the arrays", "plan(dense, x, w, device='cpu:1', memory_limit='1KiB')", "StrategyError", "use more devices, a smaller batch, or",
         None),
    ],
}  # fmt: skip
ROWS = [pytest.param(*row[1:], id=f"{group}: {row[0]}") for group, table in MISTAKES.items() for row in table]


@pytest.mark.parametrize(("mistake", "kind", "mend", "mended"), ROWS)
def test_usual_mistake_is_refused_with_a_mend_that_works_as_typed(mistake, kind, mend, mended):
    error = refusal(eval, mistake, names())
    assert type(error).__name__ == kind
    assert any(mend in problem.fix for problem in error.problems), str(error)
    assert all(problem.where and problem.why for problem in error.problems)
    if mended is not None:
        assert mend in mended or mend.split()[0] in ("did", "leave") or "jnp.asarray" in mend
        eval(mended, names())


# A cloud's name of some accelerators, and the target that it means: types of v4 and v5p slices count cores, two a chip.
CLOUD_NAMES = [
    ("v5litepod-16", "tpu-v5e:16", 16), ("tpu-v5litepod:16", "tpu-v5e:16", 16), ("v5e-4", "tpu-v5e:4", 4),
    ("V5E:4x4", "tpu-v5e:4x4", 16), ("v5p-512", "tpu-v5p:256", 256), ("v4-32", "tpu-v4:16", 16), ("v6e-256", "tpu-v6e:256", 256),
    ("tpu-v5-lite-podslice:2x4", "tpu-v5e:2x4", 8), ("a3-highgpu-8g", "h100:8", 8), ("a3-megagpu-8g", "h100:8", 8),
    ("a3-ultragpu-8g", "h200:8", 8), ("a2-ultragpu-4g", "a100:4", 4), ("ct5lp-hightpu-4t", "tpu-v5e:4", 4),
    ("ct5p-hightpu-4t", "tpu-v5p:4", 4), ("ct4p-hightpu-4t", "tpu-v4:4", 4), ("ct6e-standard-8t", "tpu-v6e:8", 8),
    ("nvidia-h100-80gb:16", "h100:16", 16), ("p5.48xlarge", "h100:8", 8), ("p4de.24xlarge", "a100:8", 8),
    ("Standard_ND96isr_H200_v5", "h200:8", 8), ("a2-highgpu-1g", "a100-40gb:1", 1), ("a2-highgpu-8g", "a100-40gb:8", 8),
    ("p4d.24xlarge", "a100-40gb:8", 8), ("Standard_ND96asr_v4", "a100-40gb:8", 8), ("nvidia-tesla-a100:16", "a100-40gb:16", 16),
    ("a4-highgpu-8g", "b200:8", 8), ("p6-b200.48xlarge", "b200:8", 8), ("nvidia-b200:64", "b200:64", 64),
    ("p5e.48xlarge", "h200:8", 8), ("p5.4xlarge", "h100:1", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "target", "count"), CLOUD_NAMES)
def test_device_by_a_cloud_name_is_the_target_with_its_chips(name, target, count):
    made = plan(dense, names()["x"], names()["w"], device=name)
    assert (made.hardware.name, made.hardware.count) == (target, count)


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("a4x-highgpu-4g", "NVIDIA GB200"), ("p6e-gb200.36xlarge", "NVIDIA GB200"), ("gb200:72", "NVIDIA GB200"),
        ("p6-b300.48xlarge", "NVIDIA B300"), ("a2-megagpu-16g", "16 NVIDIA A100 behind one switch"), ("g2-standard-4", "NVIDIA L4"),
        ("p3.16xlarge", "NVIDIA V100"), ("trn2.48xlarge", "AWS Trainium"), ("tpu7x-8", "TPU7x"),
    ],
)  # fmt: skip
def test_device_by_a_cloud_name_without_figures_says_which_accelerator_it_is(name, accelerator):
    with pytest.raises(DeviceError, match=f"there are no figures for {accelerator}") as caught:
        plan(dense, names()["x"], names()["w"], device=name)
    assert "shardfn.Chip(" in str(caught.value) and "b200" in str(caught.value)


# One rule for paths: the first part and the `/value` of an NNX variable may be there or not.
PATHS = ("kernel", "kernel/value", "net/kernel", "net/kernel/value", "net.kernel", "*/kernel", "*kernel/value")


@pytest.mark.parametrize("path", PATHS)
def test_path_of_an_nnx_variable_is_met_with_and_without_value(path, tmp_path):
    x, net = names()["x"], names()["net"]
    made = shard(lambda net, x: net(x), parameter_plan={path: (1, 4)}).plan(net, x)
    kernel = next(d for d in made.inputs if d.path == "net/kernel")
    assert (kernel.strategy, kernel.source) == ((1, 4), "you")
    assert made.why(path).planned.path == "net/kernel"
    assert next(d for d in made.what_if({path: (4, 1)}).inputs if d.path == "net/kernel").strategy == (4, 1)
    layout = tmp_path / "layout.toml"
    layout.write_text(f'format = "shardfn-layout"\nversion = 2\n[mesh]\na = 8\n[arguments]\n"{path}" = ["a", 1]\n')
    again = shard(lambda net, x: net(x), layout=layout).plan(net, x)
    assert next(d for d in again.inputs if d.path == "net/kernel").strategy == (8, 1)


@pytest.mark.parametrize("path", [*(p for p in PATHS if "net" not in p), "params/kernel", "state/params/kernel/value"])
def test_path_of_a_training_step_is_that_of_its_report(path):
    made = fitted(mode="semi_auto_parallel", parameter_plan={path: (1, 4)})
    assert {d.path: d.strategy for d in made.inputs}["state/params/kernel"] == (1, 4)


def test_value_of_attention_is_an_array_of_its_own():
    arrays = {"attention": {name: np.ones((8, 8), np.float32) for name in ("query", "key", "value")}}
    made = shard(lambda p: p, parameter_plan={"attention/value": (1, 8)}).plan(arrays)
    assert [d.strategy for d in made.inputs if d.source == "you"] == [(1, 8)]
    error = refusal(shard(lambda p: p, parameter_plan={"attention": (1, 8)}).plan, arrays)
    assert "'attention/*'" in error.problems[0].fix


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_sharding_that_a_mode_gives_is_not_said_to_be_chosen_by_the_user(mode):
    made = fitted(mode=mode)
    reasons = {re.split("[:`]", d.reason)[0] for d in made.inputs}
    assert {d.source for d in made.inputs} == {"mode"} and reasons <= {f"mode={mode!r}", "as "}


HEAD = 'format = "shardfn-layout"\nversion = 2\n'


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[arguments\n"x" = [1, 2]', "layout.toml:3: [arguments"),
        ('[arguments]\n"x" = [2, 1\n"w" = [1, 2]', 'layout.toml:4: "x" = [2, 1'),
        ('[arguments]\n"x" = [2, 1', 'layout.toml:4: "x" = [2, 1'),
        ('[arguments]\n"x" = "open', 'layout.toml:4: "x" = "open'),
        ("[mesh]\na = 2\na = 3", "layout.toml:5: a = 3"),
        ("[mesh]\na =", "layout.toml:4: a ="),
    ],
)
def test_broken_layout_file_is_refused_with_its_line(text, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout.toml").write_text(HEAD + text)
    assert [problem.where for problem in refusal(load_layout, "layout.toml").problems] == [place]


@pytest.mark.parametrize("path", ["layuot.toml", "layout", "layout.json", "nowhere/layout.toml"])
def test_missing_layout_file_is_refused_with_the_file_that_is_near(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout.toml").write_text(f"{HEAD}[mesh]\na = 8\n")
    (tmp_path / "notes.toml").write_text("")
    error = refusal(load_layout, path)
    assert (type(error).__name__, error.problems[0].fix) == ("LayoutFileError", "did you mean 'layout.toml'?")
    assert load_layout("layout.toml").mesh == (("a", 8),)


@pytest.mark.parametrize("name", ["plan.yaml", "plan.yml", "plan.txt", "plan.TOML"])
def test_name_that_is_none_of_a_layout_file_is_refused_in_both_directions(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = plan(dense, names()["x"], names()["w"])
    error = refusal(made.save, name)
    assert type(error).__name__ == "LayoutFileError" and "'plan.toml'" in error.problems[0].fix
    assert not (tmp_path / name).exists()
    for accepted in ("plan.toml", "plan", "plan.json", "plan.ckpt"):
        made.save(accepted)
        assert shard(dense, layout=accepted).plan(names()["x"], names()["w"]).in_shardings == made.in_shardings
    (tmp_path / "plan").rename(name)
    assert "'plan.toml'" in refusal(load_layout, name).problems[0].fix


def test_missing_recipe_is_refused_with_its_name():
    assert refusal(load_layout, "llama/fsdp-tp.toml").problems[0].fix == "did you mean 'llama/fsdp-tp'?"


def test_data_parallel_and_tensor_parallel_over_all_devices_share_one_axis():
    made = shard(dense, ((8, 1), (1, 8))).plan(names()["x"], names()["w"])
    assert (dict(made.mesh.shape), [d.strategy for d in made.inputs]) == ({"a": 8}, [(8, 1), (1, 8)])


def test_line_of_a_notebook_is_that_of_its_cell(monkeypatch):
    shell = types.SimpleNamespace(format_code_name=lambda name: ("Cell", "In[3]") if "ipykernel" in name else None)
    ipython = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(compile=shell))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    source = "def product(x, w):\n    return (x @ w).sum()\n"
    made = {}
    exec(compile(source, "/tmp/ipykernel_7/123456789.py", "exec"), made)
    text = str(plan(made["product"], names()["x"], names()["w"], in_strategy=((1, 8), (8, 1))))
    assert "at In[3]:2" in text and "123456789" not in text


def test_saved_layout_file_has_each_reason_once_and_no_directories(tmp_path):
    step = jax.value_and_grad(lambda params, x: (jnp.tanh(x @ params["up"]) @ params["down"]).sum())
    params = {"up": np.ones((16, 64), np.float32), "down": np.ones((64, 16), np.float32)}
    first = plan(lambda params, x: step(params, x)[1], params, names()["x"], level="memory")
    first.save(tmp_path / "first.toml")
    again = plan(lambda params, x: step(params, x)[1], params, names()["x"], layout=tmp_path / "first.toml")
    again.save(tmp_path / "again.toml")
    for name, made in (("first.toml", first), ("again.toml", again)):
        text = (tmp_path / name).read_text()
        reasons = [line for line in text.splitlines() if line.startswith("why = ")]
        assert load_layout(tmp_path / name) == made
        assert len(reasons) == len(set(reasons)) and str(tmp_path) not in text
        assert not re.search(r"/\w+\.py:\d", text)


@pytest.mark.parametrize("entry", ["(2, 1)", "(8, 1)", "P('a', None)"])
def test_entry_beside_a_layout_file_is_placed_on_the_mesh_of_the_file(entry, tmp_path):
    x, w = names()["x"], names()["w"]
    shard(dense, ((2, 1), (1, 4))).plan(x, w).save(tmp_path / "layout.toml")
    function = shard(dense, (eval(entry, names()), AUTO), layout=tmp_path / "layout.toml")
    made = function.plan(x, w)
    assert made.axes == (("a", 2), ("b", 4))
    assert [(d.strategy[0], d.source) for d in made.inputs] == [(8 if "8" in entry else 2, "you"), (1, "file")]
    np.testing.assert_allclose(function(x, w), dense(x, w), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"device": "mesh"}])
def test_empty_partition_spec_of_a_subtree_goes_with_integers(options):
    params, x = names()["params"], names()["x"]
    function = shard(model, (P(), (2, 1)), **{name: names()[value] for name, value in options.items()})
    assert [d.strategy for d in function.plan(params, x).inputs] == [(1,), (1, 1), (2, 1)]
    np.testing.assert_allclose(function(params, x), model(params, x), rtol=1e-5)


@pytest.mark.parametrize("ask", [plan, explain])
@pytest.mark.parametrize("value", [None, jnp.ones(8)], ids=["none", "array"])
def test_plan_or_report_of_something_else_than_a_function_is_refused_by_its_name(ask, value):
    text = str(refusal(lambda: ask(value, jnp.ones(8))))
    assert f"`{ask.__name__}` takes a function" in text and f"{ask.__name__}(f, x)" in text
