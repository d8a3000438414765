import dataclasses
import functools
import pickle
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cost.estimate import collective_s
from shardfn.cost.memory.live_memory import live_memory
from shardfn.draw import KINDS, draw_plan, pipeline_picture
from shardfn.draw.arrays import rows_of
from shardfn.draw.svg import text_width
from shardfn.draw.time import time_parts
from shardfn.errors import ShardError
from shardfn.frontend.meshes import shard_numbers
from shardfn.train.pipelines.schedule import FORWARD, schedule

WIDTHS = (320, 760)
LONG = "a_name_that_nobody_should_give_" * 6


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def mlp(params, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w["up"]) @ w["down"]
    return x


def train(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(mlp(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def layers(count, width=256, hidden=1024):
    return {"layers": [{"up": shape(width, hidden), "down": shape(hidden, width)} for _ in range(count)]}


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, w)


def total(arrays):
    return sum(jnp.sum(a) for a in arrays.values())


def given(*specs):
    return {"in_strategy": specs}


CASES = {
    "training": (train, (layers(3), shape(512, 256)), {"parameter_plan": {"*/up": (1, 4), "*/down": (4, 1)}, "in_strategy": (shardfn.AUTO, (2, 1)), "donate_argnums": 0}, "tpu-v5e:2x4"),
    "searched": (mlp, (layers(2), shape(512, 256)), {"level": 0}, "tpu-v5e:2x4"),
    "on CPUs": (train, (layers(2), shape(64, 256)), given(shardfn.AUTO, (8, 1)), "cpu:8"),
    "loop": (scanned, (shape(12, 512, 512), shape(256, 512)), given((1, 1, 4), (2, 1)), "h100:8"),
    "matmul": (jnp.matmul, (shape(16, 32), shape(32, 64)), given((2, 4), (4, 1)), "tpu-v5e:2x4"),
    "200 arguments": (total, ({f"array{i}x": shape(8, 16 + i) for i in range(200)},), {"parameter_plan": {"*": (8, 1)}}, "tpu-v5e:2x4"),
    "512 devices": (jnp.matmul, (shape(1024, 512), shape(512, 256)), given((32, 16), (16, 1)), "h100:512"),
    "512 devices on one axis": (jnp.tanh, (shape(1024, 512),), given((512, 1)), "h100:512"),
    "512 devices on three axes": (jnp.tanh, (shape(64, 64, 64),), given((8, 8, 8)), "tpu-v5p:8x8x8"),
    "2048 devices": (jnp.tanh, (shape(4096, 512),), given((2048, 1)), "h100:2048"),
    "one device": (jnp.matmul, (shape(16, 32), shape(32, 64)), {}, "tpu-v5e:1"),
    "zero-size arrays": (lambda x, w: (x @ w, w + 1), (shape(0, 8), shape(8, 0)), given((1, 2), (2, 1)), "tpu-v5e:4"),
    "scalar": (lambda x: x + 1, (shape(),), {}, "tpu-v5e:4"),
    "no arguments": (lambda: jnp.zeros((8, 8)), (), {}, "tpu-v5e:4"),
    "long names": (total, ({LONG + str(i) + "/" + "模型" * 20: shape(8, 4 + i) for i in range(5)},), {"parameter_plan": {"*": (4, 1)}}, "tpu-v5e:4"),
    "odd names": (total, ({"<b>&\"'": shape(8, 4), "]]>\n\t": shape(8, 8)},), {"parameter_plan": {"*": (4, 1)}}, "tpu-v5e:4"),
    "no collectives": (jnp.tanh, (shape(64, 64),), given((4, 1)), "tpu-v5e:4"),
    "over the limit": (jnp.matmul, (shape(65536, 65536), shape(65536, 65536)), given((1, 1), (1, 2)), "tpu-v5e:2"),
}  # fmt: skip


@functools.cache
def made(case):
    function, args, options, device = CASES[case]
    return shardfn.plan(function, *args, device=device, **options)


SCHEDULES = {
    "1f1b": schedule("1f1b", 4, 8),
    "gpipe": schedule("gpipe", 2, 4),
    "chunks": schedule("1f1b", 4, 8, 2),
    "forward": schedule(FORWARD, 3, 5),
    "many devices": schedule("1f1b", 64, 128),
    "many micro-batches": schedule("1f1b", 4, 2000),
    "one": schedule("1f1b", 1, 1),
}
PICTURES = {
    **{f"{case}, {kind}": (case, kind) for case in CASES for kind in KINDS},
    **{f"schedule {name}": (name, "") for name in SCHEDULES},
}


@functools.cache
def drawn(name, width=760):
    case, kind = PICTURES[name]
    return made(case).draw(kind, width=width) if kind else SCHEDULES[case].draw(width)


def tree(svg):
    return ET.fromstring(svg)


def tagged(root, tag):
    return [e for e in root.iter() if e.tag == f"{{http://www.w3.org/2000/svg}}{tag}"]


def boxes(root):
    """The box of each text by the estimate of its width: left, top, right, bottom, text."""
    for e in tagged(root, "text"):
        own = "".join(t for t in (e.text, *(child.tail for child in e)) if t)
        size = float(e.get("font-size", "12"))
        width = text_width(own, size, e.get("font-weight") is not None)
        x, y = float(e.get("x")), float(e.get("y"))
        left = x - {"start": 0, "middle": width / 2, "end": width}[e.get("text-anchor", "start")]
        yield left, y - 0.76 * size, left + width, y + 0.2 * size, own


# ---- every picture of every case


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PICTURES)
def test_texts_stay_in_the_view_box_and_off_each_other(name, width):
    picture = drawn(name, width)
    root = tree(picture.svg)
    assert root.get("viewBox") == f"0 0 {picture.width} {picture.height}"
    assert picture.width == width
    found = sorted(boxes(root), key=lambda box: box[1])
    for left, top, right, bottom, text in found:
        assert left >= 0 and top >= 0 and right <= picture.width and bottom <= picture.height, text
    for i, one in enumerate(found):
        for two in found[i + 1 :]:
            if two[1] >= one[3]:
                break
            assert one[2] <= two[0] + 0.5 or two[2] <= one[0] + 0.5, (one, two)


@pytest.mark.parametrize("name", PICTURES)
def test_shapes_stay_in_the_view_box(name):
    picture = drawn(name)
    root = tree(picture.svg)
    for e in tagged(root, "rect"):
        x, y, width, height = (float(e.get(k)) for k in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + width <= picture.width + 0.02 and y + height <= picture.height + 0.02
    for e in (*tagged(root, "polygon"), *tagged(root, "polyline")):
        for x, y in (map(float, pair.split(",")) for pair in e.get("points").split()):
            assert 0 <= x <= picture.width and 0 <= y <= picture.height


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_have_light_and_dark_colours_and_need_nothing_else(name):
    text = drawn(name).svg
    assert "prefers-color-scheme:dark" in text
    used = {c for group in re.findall(r'class="([^"]*)"', text) for c in group.split()} - {"shardfn-picture"}
    assert used <= set(re.findall(r"\.shardfn-picture \.([\w-]+)\{", text))
    assert not re.search(r"<script|href|url\(|@import| id=", text)
    assert "nan" not in text.split("</style>")[1].replace(" nan", "") and "inf," not in text


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_deterministic(name):
    case, kind = PICTURES[name]
    again = draw_plan(made(case), kind) if kind else pipeline_picture(SCHEDULES[case])
    assert again == drawn(name)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_of_a_readable_size(name):
    picture = drawn(name)
    assert picture.height <= 1400
    assert len(picture.svg) < 400_000
    assert all(float(e.get("font-size", "12")) >= 8 for e in tagged(tree(picture.svg), "text"))


# ---- what each picture must show


@pytest.mark.parametrize("case", CASES)
def test_arrays_picture_has_every_array(case):
    plan, text = made(case), " ".join(tree(drawn(f"{case}, arrays").svg).itertext())
    for row in rows_of((*plan.inputs, *plan.outputs)):
        for path in row.paths[:8]:
            assert " ".join(path.split()) in " ".join(text.split())


@pytest.mark.parametrize("case", CASES)
def test_time_picture_has_every_collective_and_the_time_of_the_plan(case):
    plan, parts = made(case), time_parts(made(case))
    text = " ".join(tree(drawn(f"{case}, time").svg).itertext())
    for c in plan.collectives:
        assert f"{c.kind} over" in text
    kinds = {"compute", "memory"}
    assert sum(p.seconds for p in parts if p.kind in kinds) == pytest.approx(plan.cost.compute_s)
    assert sum(p.seconds for p in parts if p.kind not in kinds) == pytest.approx(plan.cost.communication_s)
    assert sum(p.count for p in parts if p.kind not in kinds) == len(plan.collectives)
    assert sum(collective_s(c, plan.hardware, plan.axes) for c in plan.collectives) == pytest.approx(
        plan.cost.communication_s
    )


@pytest.mark.parametrize("case", CASES)
def test_memory_picture_names_what_makes_up_the_peak(case):
    plan = made(case)
    live = live_memory(plan.partitioned, plan._answered.problem.donated, plan.hardware.chip)
    assert live.estimate.peak == plan.cost.memory.peak
    assert sum(live.temporaries[i].bytes for i in live.at_peak) == plan.cost.memory.temporaries


def test_memory_picture_shows_bands_limit_and_source_lines():
    root = tree(drawn("over the limit, memory").svg)
    texts = ["".join(e.itertext()) for e in tagged(root, "text")]
    assert any(text.startswith("limit 14.9 GiB (tpu-v5e)") for text in texts)
    assert any("over the limit" in text for text in texts)
    assert any(text.startswith("peak ") for text in texts)
    assert len(tagged(root, "polygon")) >= 2
    assert any("test_draw.py:" in text for text in tree(drawn("training, memory").svg).itertext())


def test_memory_picture_of_a_plan_from_another_process_says_what_is_unknown():
    plan = pickle.loads(pickle.dumps(made("training")))
    assert plan.cost.memory.donated
    assert "another process" in plan.draw("memory").svg
    assert "another process" not in drawn("training, memory").svg


@pytest.mark.parametrize(
    "case", ("training", "matmul", "512 devices", "512 devices on one axis", "one device", "scalar")
)
def test_mesh_picture_has_each_device_once_for_each_array(case):
    plan = made(case)
    for d in {d.spec: d for d in plan.inputs}.values():
        titles = [e.text for e in tagged(tree(plan.draw("mesh", d.path).svg), "title")]
        holders = [t for t in titles if re.match(r"device \d+ holds", t)]
        assert [int(t.split()[1]) for t in holders] == list(range(plan.hardware.count))


def test_mesh_picture_shows_the_slices_that_jax_gives_the_devices():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plan = dataclasses.replace(made("matmul"), axes=(("a", 2), ("b", 4)), order=None)
    d = dataclasses.replace(plan.inputs[0], spec=(("b",), ("a",)), strategy=(4, 2))
    indices = jax.sharding.NamedSharding(mesh, d.partition_spec).devices_indices_map(d.shape)
    starts = [
        [(s.start or 0) // n for s, n in zip(indices[device], d.local_shape, strict=False)]
        for device in mesh.devices.flat
    ]
    assert shard_numbers(plan.axes, d.spec) == starts


def test_mesh_picture_has_the_devices_in_the_order_of_the_mesh():
    plan = dataclasses.replace(made("matmul"), order=(7, 6, 5, 4, 3, 2, 1, 0))
    titles = [e.text for e in tagged(tree(plan.draw("mesh").svg), "title")]
    assert [int(t.split()[1]) for t in titles if " holds " in t] == list(plan.order)


def test_mesh_picture_of_the_largest_argument_by_default():
    assert made("matmul").draw("mesh").title == "b: float32[32,64]"
    assert made("matmul").draw("mesh", "a").title == "a: float32[16,32]"


def test_search_picture_has_every_candidate_and_marks_the_chosen_one():
    plan = made("searched")
    assert len(plan.candidates) > 3
    root = tree(drawn("searched, search").svg)
    points = [t for e in tagged(root, "circle") for t in e.itertext()]
    assert len(points) == len(plan.candidates)
    assert sum(t.startswith("this plan") for t in points) == 1
    assert "One candidate" in drawn("matmul, search").svg


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline_picture_has_the_work_of_every_drawn_tick(name):
    s, root = SCHEDULES[name], tree(drawn(f"schedule {name}").svg)
    titles = [e.text for e in tagged(root, "title") if e.text.startswith("tick ")]
    assert len(titles) == len(set(titles))
    if name in ("1f1b", "gpipe", "chunks", "forward", "one"):
        assert len(titles) == len(s.ticks) * s.devices
        assert sum("micro-batch" in t for t in titles) == sum(u is not None for tick in s.ticks for u in tick.units)
    assert f"{s.bubble:.1%}" in drawn(f"schedule {name}").svg


# ---- the object, and errors


def test_picture_is_its_svg_shows_itself_and_is_saved(tmp_path):
    picture = made("matmul").draw("time")
    assert str(picture) == picture._repr_svg_() == picture.svg
    assert picture.svg in picture._repr_html_()
    assert repr(picture) == f"<Picture {picture.title!r}, {picture.width} x {picture.height}>"
    picture.save(tmp_path / "time.svg")
    assert (tmp_path / "time.svg").read_text(encoding="utf-8") == picture.svg


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda plan: plan.draw("memori"), "memory"),
        (lambda plan: plan.draw("everything"), "mesh, arrays, memory, time, search"),
        (lambda plan: plan.draw("pipeline"), "pipe.schedule.draw()"),
        (lambda plan: plan.draw(3), "mesh, arrays, memory, time, search"),
        (lambda plan: plan.draw("mesh", "c"), "use one of these paths"),
        (lambda plan: plan.draw("time", "a"), "draw(\"mesh\", 'a')"),
        (lambda plan: plan.draw("time", width=100), "320 to 4000"),
        (lambda plan: plan.draw("time", width="wide"), "760"),
        (lambda plan: plan.draw("time").save("time.png"), "time.svg"),
        (lambda plan: plan.draw("time").save("/nowhere/at/all/time.svg"), "directory"),
        (lambda plan: SCHEDULES["1f1b"].draw(5), "320 to 4000"),
    ],
)
def test_wrong_calls_are_errors_with_a_fix(call, fix):
    with pytest.raises(ShardError) as error:
        call(made("matmul"))
    assert fix in error.value.problems[0].fix
