import dataclasses
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding

import shardfn
from shardfn.compiled.executable import read
from shardfn.cost.devices.hardware import CHIPS, Hardware, resolve
from shardfn.cost.estimate import Cost
from shardfn.cost.memory.live_memory import MemoryEstimate
from shardfn.cost.overlap import Overlap
from shardfn.ir.model import Graph, Op, Value
from shardfn.ir.partitioned import Collective, Communication, PartitionedProgram
from shardfn.planning.layout_rules import Constraint
from shardfn.planning.plan import Candidate, Decision, DimensionGroup, Figures, Plan
from shardfn.planning.plan.summary import optimality
from shardfn.render import parts as render
from shardfn.report.data import attributions
from shardfn.report.report import Report, make_report
from shardfn.report.saved_graphs import save_graphs, strategies_text

LAYERS = 4
X, COLUMNS, REPLICATED = (("b",), ()), ((), ("a",)), ((), ())
FILE = "/home/me/project/model.py"


def decided(path, shape, spec, source, reason="", runner_up=""):
    sizes = {"a": 4, "b": 2}
    strategy = tuple(int(np.prod([sizes[axis] for axis in dim])) for dim in spec)
    return Decision(
        path, shape, "float32", strategy, spec, source, reason, runner_up, 4 * int(np.prod(shape) / np.prod(strategy))
    )


def made(**changes) -> Plan:
    """A plan of a small model, made by hand: nothing in it depends on JAX."""
    runner = {"up": "(4, 1): +8.1 us by the search's estimate", "down": "(1, 4): +8.1 us by the search's estimate"}
    inputs = [
        decided(
            f"params/layers/{i}/{name}",
            shape,
            spec,
            "searched",
            f"dim {dim} follows params/layers/{i}/up dim 1",
            runner[name],
        )
        for i in range(LAYERS)
        for name, shape, spec, dim in (("up", (32, 128), COLUMNS, 1), ("down", (128, 32), (("a",), ()), 0))
    ]
    inputs += [
        decided("params/scale", (32,), ((),), "file", "mlp.toml"),
        decided("x", (64, 32), X, "you", "in_strategy[1]"),
    ]
    outputs = (decided("result/0", (64, 32), X, "propagated"), decided("result/1", (), (), "propagated"))
    values = (Value((64, 32), "f32"), Value((32, 128), "f32"), Value((64, 128), "f32"), Value((128, 32), "f32"),
              Value((64, 32), "f32"), Value((), "f32"), Value((), "f32"), Value((64, 32), "f32"))  # fmt: skip
    one = (
        Op("dot_general", (0, 1), (2,), None, 1, f"{FILE}:12", ((0, 1),)),
        Op("tanh", (2,), (2,), None, 1, f"{FILE}:12"),
        Op("dot_general", (2, 3), (7,), None, 1, f"{FILE}:13", ((0, 1),), site=0),
        Op("all_reduce", (7,), (4,), None, 1, f"{FILE}:13"),
    )
    ops = (*one * LAYERS, Op("reduce", (4, 5), (6,), None, 3, "", ((0, 0),), site=1))
    specs = (X, COLUMNS, (("b",), ("a",)), (("a",), ()), X, (), (), X)
    graph = Graph(values, ops, (1, 3) * LAYERS + (5, 0), (4, 6), ())
    layer = Collective("all-reduce", ("a",), 4, (32, 32), "f32", 6144, 1, f"{FILE}:13", "dot_general")
    made = Plan(
        function="step",
        hardware=Hardware(CHIPS["tpu-v5e"], "tpu", 8, name="tpu-v5e:2x4"),
        level=2,
        axes=(("a", 4), ("b", 2)),
        order=None,
        inputs=tuple(inputs),
        outputs=outputs,
        dimension_groups=(
            DimensionGroup("params/scale.0", 32, ("params/scale.0", "x.1"), ()),
            *(DimensionGroup(f"params/layers/{i}/up.1", 128, (f"params/layers/{i}/up.1", f"params/layers/{i}/down.0"), ("a",))
              for i in range(LAYERS)),
            DimensionGroup("x.0", 64, ("x.0", "result/0.0"), ("b",)),
        ),
        collectives=(
            Collective("all-reduce", ("b",), 2, (), "f32", 4, 3, "", "reduce"),
            *(layer,) * LAYERS,
            Collective("all-to-all", ("a",), 4, (16, 16), "bf16", 384, 1, "", "return"),
        ),
        cost=Cost(1.5e6, 4 * 6144 + 384 + 12, MemoryEstimate(36992, 4100, 20480), 7.6e-9, 1.4e-5, unmodelled_ops=(f"cumsum ({FILE}:20)",)),
        policy="search: 12 classes in 3 ms",
        diagnostics=("no sharding rule for: cumsum (model.py:20); XLA decides there",),
        partitioned=PartitionedProgram(graph, specs, {"a": 4, "b": 2}, ()),
        constraints=(Constraint("dot_general", 2, f"{FILE}:13", (None, (("a",), ())), (X,)),) * 2,
        gap=0.0125,
        candidates=(Candidate("this plan", (("a", 4), ("b", 2)), Figures(1.4e-5, 24972, 61572, 1.5e6)),
                    Candidate("8", (("a", 8),), Figures(2.1e-5, 0, 185024, 3e6))),
    )  # fmt: skip
    made = dataclasses.replace(made, **changes)
    sent = tuple(Communication(c.kind, c.axes, c.group_size, OPERANDS.get(c.cause, 5), 5, c.trips, c.where, c.cause)
                 for c in made.collectives)  # fmt: skip
    made = dataclasses.replace(made, partitioned=dataclasses.replace(made.partitioned, communications=sent))
    vars(made)["overlap"] = Overlap(1.4e-5, 1.3e-5, 1.2e-5)  # in the place of that of a graph that no program has
    return made


OPERANDS = {"reduce": 6, "dot_general": 7, "return": 2}
"""By cause the value of the graph that a collective of `made` sends; others send value 5, a scalar."""

TRANSFERS = ("`x` arrives with SingleDeviceSharding and is transferred in every call: 4 KiB per device",)


# ---- the texts


def test_short_report_at_80_columns(golden):
    text = make_report(made(), transfers=TRANSFERS).to_text(80)
    golden("report_80", text)
    assert max(map(len, text.splitlines())) <= 80


def test_full_report_at_120_columns(golden):
    text = make_report(made(), transfers=TRANSFERS).full().to_text(120)
    golden("report_full_120", text)
    assert max(map(len, text.splitlines())) <= 120


def test_report_without_a_terminal_wraps_nothing():
    text = make_report(made(), transfers=TRANSFERS).full().to_text()
    assert TRANSFERS[0] in text
    assert "params/layers/*/up dim 1 over a, params/layers/*/down dim 0 over a" in text


def test_headline_on_one_device_says_so():
    alone = decided("x", (64, 32), REPLICATED, "you", "in_strategy[0]")
    plan = made(
        hardware=dataclasses.replace(resolve("cpu"), count=1, name="1 x cpu"), axes=(), inputs=(alone,), outputs=(),
        dimension_groups=(), collectives=(), diagnostics=(), policy="every sharding was given", constraints=(), candidates=(),
        gap=None, cost=Cost(1.5e6, 0, MemoryEstimate(8192, 0, 0), 7.6e-9, 0.0),
        partitioned=PartitionedProgram(Graph((Value((64, 32), "f32"),), (), (0,), (), ()), (REPLICATED,), {}, ()),
    )  # fmt: skip
    report = make_report(plan)
    assert report.to_text().startswith("step: one device\ndevices: 1 x cpu, mesh of one device\n")
    assert not any(isinstance(part, render.Drawing) for part in report.full().parts)


def test_headline_of_a_plan_that_does_not_fit_says_by_how_much():
    plan = made(
        cost=Cost(1.0, 0, MemoryEstimate(20 * 10**9, 0, 20 * 10**9), 1.0, 0.0),
        diagnostics=("too large; fix: use 4 ways",),
    )
    text = make_report(plan).to_text()
    assert (
        "memory: does not fit, 22.4 GiB too much: 37.3 GiB per device at the peak (estimate), tpu-v5e 14.9 GiB" in text
    )
    assert "next step: use 4 ways" in text


def test_strategies_text_has_one_line_per_op():
    lines = strategies_text(made()).splitlines()
    assert len(lines) == 1 + 10 + 4 * LAYERS + 1
    assert lines[11] == (
        "%2 = dot_general(%0, %1)  in_strategy: ((2, 1), (1, 4)), out_strategy: ((2, 4),)"
        f" : (f32[64,32], f32[32,128]) -> (f32[64,128])  # {FILE}:12"
    )


@pytest.mark.slow
def test_two_layer_training_step_fits_on_two_screens():
    def step(params, momentum, x):
        loss = lambda p: jnp.mean((jax.nn.relu(x @ p["w1"]) @ p["w2"]) ** 2)  # noqa: E731
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(loss)(params))
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    params = {"w1": ONES((32, 128)), "w2": ONES((128, 16))}
    report = shardfn.explain(step, params, params, ONES((64, 32)), level=2)
    assert len(report.to_text(120).splitlines()) <= 100
    assert len(report.full().to_text(120).splitlines()) > len(report.to_text(120).splitlines())


# ---- the data


def schema(value, path=""):
    """Every key of plain data with the types found there."""
    if isinstance(value, dict):
        named = path.endswith((".kinds", ".memory")) and "compiled" in path  # keys that are names
        return {row for key, each in value.items() for row in schema(each, f"{path}.{'*' if named else key}")}
    if isinstance(value, list):
        return {row for each in value for row in schema(each, f"{path}[]")} or {f"{path}[]"}
    return {f"{path}: {'null' if value is None else type(value).__name__}"}


def compiled_program(**changes):
    """Stands for an executable: its text, its sizes."""
    hlo = """HloModule m, num_partitions=8
ENTRY %main (x: f32[32,32]) -> f32[32,32] {
  %x = f32[32,32]{1,0} parameter(0)
  ROOT %r = f32[32,32]{1,0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
}"""
    sizes = {"argument_size_in_bytes": 36992, "output_size_in_bytes": 4116, "temp_size_in_bytes": 1024,
             "alias_size_in_bytes": 0, "peak_memory_in_bytes": 41108}  # fmt: skip
    return types.SimpleNamespace(
        as_text=lambda: hlo,
        memory_analysis=lambda: types.SimpleNamespace(**{**sizes, **changes}),
        cost_analysis=lambda: {"flops": 1.0},
    )


def test_schema(golden):
    """Programs read this: what changes here is a change of `SCHEMA`."""
    golden(
        "report_schema", "\n".join(sorted(schema(make_report(made(), read(compiled_program()), TRANSFERS).to_dict())))
    )


def test_compiled_text(golden):
    text = make_report(made(), read(compiled_program()), TRANSFERS).to_text()
    golden("report_compiled", text[text.index("Compiled:") :])


def test_data_is_complete_and_its_own():
    report = make_report(made())
    data = report.to_dict()
    assert data == json.loads(report.to_json())
    data["function"] = "other"
    assert report.to_dict()["function"] == "step"
    assert [len(data[key]) for key in ("arguments", "results", "dimension_groups", "ops", "collectives")] == [
        10,
        2,
        6,
        17,
        6,
    ]
    assert data["mesh"] == [{"axis": "a", "size": 4, "stride": 2}, {"axis": "b", "size": 2, "stride": 1}]
    assert data["collectives"][1]["where"] == f"{FILE}:13"
    assert data["ops"][0] == {
        "op": "dot_general", "in_strategy": [[2, 1], [1, 4]], "out_strategy": [[2, 4]], "runs": 1, "where": f"{FILE}:12",
    }  # fmt: skip


def test_collective_that_no_sharded_array_leads_to_has_no_cause():
    collective = Collective("all-gather", ("c",), 2, (), "f32", 4, 1, "")
    assert attributions(made(collectives=(collective,))) == [([], [])]


# ---- the drawing


def drawing(plan):
    return next(part for part in make_report(plan).full().parts if isinstance(part, render.Drawing))


@pytest.mark.parametrize("axes", [(("a", 8),), (("a", 4), ("b", 2)), (("a", 2), ("b", 2), ("c", 2))])
def test_pieces_are_what_jax_puts_there(axes):
    names = [name for name, _ in axes]
    mesh = jax.make_mesh(tuple(size for _, size in axes), tuple(names))
    specs = [((name,), ()) for name in names] + [((), tuple(names)), (tuple(reversed(names)), ())]
    sizes = dict(axes)
    arrays = []
    for i, spec in enumerate(specs):
        strategy = tuple(int(np.prod([sizes[a] for a in dim])) for dim in spec)
        arrays.append(Decision(f"x{i}", (16, 8 * (i + 1)), "float32", strategy, spec, "you"))
    drawn = drawing(made(axes=axes, inputs=tuple(arrays), outputs=(), dimension_groups=(), collectives=()))
    assert drawn.axes == axes
    assert len(drawn.arrays) == len(arrays)
    for decision, array in zip(arrays, drawn.arrays, strict=True):
        slices = NamedSharding(mesh, decision.partition_spec).devices_indices_map(decision.shape)
        held = [slices[device] for device in mesh.devices.flat]
        rows = ([(s.indices(n)[:2], n) for s, n in zip(at, decision.shape, strict=True)] for at in held)
        texts = [[":" if (a, b) == (0, n) else f"{a}:{b}" for (a, b), n in row] for row in rows]
        assert array.shards == tuple(f"[{', '.join(text)}]" for text in texts)


@pytest.mark.parametrize(
    ("axes", "shown"), [((("a", 16), ("b", 16)), [8, 8]), ((("a", 4096),), [64]), ((("a", 512), ("b", 2)), [32, 2])]
)
def test_at_most_64_devices_are_drawn_and_that_is_said(axes, shown):
    count = int(np.prod([size for _, size in axes]))
    hardware = Hardware(CHIPS["tpu-v5e"], "tpu", count, name=f"tpu-v5e:{count}")
    x = Decision("x", (4096, 4), "float32", (axes[0][1], 1), (("a",), ()), "you")
    drawn = drawing(made(axes=axes, hardware=hardware, inputs=(x,), outputs=(), dimension_groups=(), collectives=()))
    assert [size for _, size in drawn.axes] == shown
    assert len(drawn.devices) == len(drawn.arrays[0].shards) == 64
    assert f"64 of {count} devices are shown" in drawn.note
    assert drawn.devices[-1] == np.ravel_multi_index([s - 1 for s in shown], [size for _, size in axes])


def test_devices_in_another_order():
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    report = make_report(made(order=order))
    assert drawing(made(order=order)).devices == order
    assert "devices in the order of the mesh: 7, 6, 5" in report.to_text()


# ---- real functions on 8 devices


def dense(x, w):
    return jax.nn.gelu(x @ w)


def loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"]) ** 2)


def layers(weights, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w[0]) @ w[1], None), x, weights)[0]


ONES = jnp.ones
PARAMS = {"w1": ONES((32, 128)), "b1": ONES(128), "w2": ONES((128, 16))}
CASES = {
    "matmul": (dense, (ONES((64, 32)), ONES((32, 128))), ((4, 1), (1, 2)), []),
    "grad": (
        jax.grad(loss), (PARAMS, ONES((64, 32))), ({"w1": (1, 4), "b1": (4,), "w2": (4, 1)}, (2, 1)),
        [("all-reduce", 1)] * 4,
    ),
    "scan": (
        layers, ((ONES((6, 32, 64)), ONES((6, 64, 32))), ONES((64, 32))), (((1, 1, 4), (1, 4, 1)), (2, 1)),
        [("all-reduce", 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "args", "strategy", "expected"), CASES.values(), ids=list(CASES))
def test_real_functions(fn, args, strategy, expected):
    function = shardfn.shard(fn, strategy)
    plan = function.plan(*args)
    report = function.explain(*args, compiled=True)
    data, text = report.to_dict(), report.to_text()

    assert [tuple(d["strategy"]) for d in data["arguments"]] == [d.strategy for d in plan.inputs]
    assert [(c["kind"], c["runs"]) for c in data["collectives"]] == expected
    assert sum(c["total_bytes"] for c in data["collectives"]) == plan.cost.bytes_sent
    assert sum(c["time_s"] for c in data["collectives"]) == pytest.approx(plan.cost.communication_s)
    assert all(c["cause"]["shardings"] for c in data["collectives"])
    assert all(pathlib.Path(c["where"].rpartition(":")[0]) == pathlib.Path(__file__) for c in data["collectives"])
    assert all(d.path in text for d in (*plan.inputs, *plan.outputs))
    for kind, pair in data["compiled"]["kinds"].items():
        assert pair["predicted"]["bytes_sent"] == pair["compiled"]["bytes_sent"], kind
    flops = data["compiled"]["matmul_flops"]
    assert flops["predicted"] == flops["compiled"]
    memory = data["compiled"]["memory"]
    assert memory["arguments"]["predicted"] == memory["arguments"]["compiled"]
    assert not any("no sharding rule" in why for why in data["compiled"]["differences"])


def test_a_searched_plan_says_what_else_was_weighed():
    function = shardfn.shard(jax.grad(loss), level=2, search_mode="dynamic_programming", device="h100:8")
    shapes = {"w1": (4096, 8192), "b1": (8192,), "w2": (8192, 4096)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((4096, 4096), "float32")
    plan, report = function.plan(params, x), function.explain(params, x)
    data, text, html = report.to_dict(), report.full().to_text(200), report.to_html()
    assert data["optimality_gap"] == plan.gap
    assert f"optimality: {optimality(plan)}" in text
    best, *others = data["candidates"]
    assert best["name"] == "this plan"
    assert best["cost"]["time_s"] == plan.cost.time_s
    assert others
    assert all(c["cost"]["time_s"] >= plan.cost.time_s for c in others)
    for shown in (text, html):
        assert "Candidates evaluated" in shown
        assert all(c["name"] in shown for c in others[:11])
        assert ("Sharding constraints" in shown) is bool(plan.constraints)
    assert len(data["constraints"]) == len(plan.constraints)
    times = [c["time_s"] for c in data["collectives"]]
    assert times == sorted(times, reverse=True)
    assert all(told["runner_up"] in text for told in data["arguments"])


def test_runner_up_of_an_argument_is_the_first_row_of_why():
    shape = jax.ShapeDtypeStruct((512, 512), "float32")
    plan = shardfn.plan(lambda x, w, v: jnp.tanh(x @ w) @ v, *[shape] * 3, device="h100:8", level=2)
    untold = dataclasses.replace(plan, inputs=tuple(dataclasses.replace(d, runner_up="") for d in plan.inputs))
    for told in (told for each in (plan, untold) for told in make_report(each).to_dict()["arguments"]):
        row = plan.why(told["path"]).rows[0]
        assert told["runner_up"] == "{}: {}, {} sent, {} memory".format(row.strategy, *row.more.signed_texts())


def test_where_arrays_have_no_runner_up_that_of_all_is_said():
    runner = "8 grid: 12 B sent"
    inputs = tuple(dataclasses.replace(d, runner_up="") for d in made().inputs)
    text = make_report(made(inputs=inputs, runner_up=runner)).full().to_text()
    assert text.count(runner) == 1
    assert "Runners-up" not in text


def test_a_plan_for_a_target_says_that_it_is_not_here():
    x, w = jax.ShapeDtypeStruct((1024, 512), "float32"), jax.ShapeDtypeStruct((512, 2048), "float32")
    report = shardfn.explain(dense, x, w, in_strategy=((16, 1), (1, 16)), device="tpu-v5e:16x16")
    assert "devices: tpu-v5e:16x16 (256 devices, not here), mesh a=16 x b=16" in report.to_text()
    assert "64 of 256 devices are shown" in report._repr_html_()
    assert report.to_dict()["hardware"]["is_here"] is False


def test_a_report_shows_itself():
    report = make_report(made())
    assert isinstance(report, Report)
    assert str(report) == repr(report)
    assert report._repr_html_().startswith("<section")
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(report)
    assert "Arguments" in capture.get()


def test_equal_layers_are_one_row_and_cut_arrays_stay():
    many = tuple(
        decided(f"p{chr(97 + i // 26)}{chr(97 + i % 26)}", (32, 32), REPLICATED, "searched") for i in range(50)
    )
    text = make_report(made(inputs=(*many, made().inputs[-1]))).to_text()
    table = text[text.index("Arguments") : text.index("Results")]
    assert "\nx " in table
    assert "39 more rows" in table


# ---- save_graphs


def test_saved_graphs_are_numbered_and_never_overwritten(tmp_path):
    directory = tmp_path / "new" / "graphs"
    first = save_graphs(made(), str(directory))
    first[0].write_text("mine")
    second = save_graphs(made(function="other"), str(directory))
    third = save_graphs(made(level=1), str(directory))
    (directory / "step_2_report.json").write_text("{}")
    fourth = save_graphs(made(), str(directory))
    assert [path.name for pair in (first, second, third, fourth) for path in pair] == [
        "step_0_strategies.txt", "step_0_report.json", "other_0_strategies.txt", "other_0_report.json",
        "step_1_strategies.txt", "step_1_report.json", "step_3_strategies.txt", "step_3_report.json",
    ]  # fmt: skip
    assert first[0].read_text() == "mine"
    assert json.loads(third[1].read_text())["level"] == 1


@pytest.mark.parametrize(
    ("name", "safe"),
    [("<lambda>", "lambda"), ("../../etc/x", "etc_x"), ("Model.block 1", "Model.block_1"), ("ä", "function"),
     ("f" * 300, "f" * 80)],
)  # fmt: skip
def test_saved_names_are_safe(tmp_path, name, safe):
    assert save_graphs(made(function=name), tmp_path)[0] == tmp_path / f"{safe}_0_strategies.txt"


def test_axes_of_a_mesh_of_ones_own_are_named():
    mesh = AbstractMesh((4, 2), ("data", "model"))
    x = Decision("x", (64, 32), "float32", (4, 2), (("data",), ("model",)), "you")
    plan = made(axes=tuple(mesh.shape.items()), inputs=(x,), outputs=(), dimension_groups=(), collectives=())
    text = make_report(plan).to_text()
    assert "mesh data=4 x model=2" in text
    assert "P('data', 'model')" in text
    assert "nothing: its devices repeat the same work" in text


@pytest.mark.parametrize("width", [80, 120])
def test_texts_in_a_terminal_keep_its_width(monkeypatch, width):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    made = shardfn.plan(jnp.matmul, ONES((64, 32)), ONES((32, 128)), device="tpu-v5e:2x4")
    for text in (str(made), str(shardfn.explain(made)), str(made.why("a"))):
        assert max(map(len, text.splitlines())) <= width


def test_runners_up_of_a_parameter_and_its_moments_are_one_row():
    def searched(path, size, other):
        return Decision(path, (64, size), "float32", (4, 1), (("a",), ()), "searched", "", f"{other}: +1 us", 1024)

    inputs = tuple(
        searched(f"{tree}/{name}", size, other)
        for tree in ("params", "state/0/mu", "state/0/nu")
        for name, size, other in (("up", 128, "(1, 4)"), ("down", 32, "(1, 1)"))
    )
    full = make_report(made(inputs=inputs, outputs=(), dimension_groups=())).full()
    (found,) = (part for part in full.parts if part.title.startswith("Runners-up"))
    assert sorted((row[0], row[1]) for row in found.rows) == [
        ("params/down and 2 alike", "3"), ("params/up and 2 alike", "3")
    ]  # fmt: skip


@pytest.mark.parametrize(("device", "is_said"), [("cpu:8", True), ("tpu-v5e:2x4", False)])
def test_times_of_cpu_devices_that_nobody_calibrated_order_plans_alone(device, is_said):
    x, w = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    plan = shardfn.plan(lambda x, w: x @ w, x, w, in_strategy=((8, 1), (1, 1)), device=device)
    assert str(shardfn.explain(plan)).count("order plans, no more") == is_said
    chip = dataclasses.replace(plan.hardware.chip, source="measured here")
    measured = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, chip=chip))
    assert "order plans" not in str(make_report(measured))
