"""Links of mesh axes, and targets made of a user's own chip."""

import math
import types

import pytest

from shardfn.cost.devices.chips import CHIPS, Chip, load_chip, most_cubic, save_chip
from shardfn.cost.devices.hardware import resolve, torus
from shardfn.cost.devices.links import link_over, links
from shardfn.errors import DeviceError

MINE = Chip("mine", "gpu", 4e14, 2e12, 64e9, 2e11, 1e-5, node=4, network_bytes_s=1e10)


def rates(target, *sizes):
    axes = tuple((chr(97 + i), n) for i, n in enumerate(sizes))
    return [round(link.bytes_s / 1e9, 6) for link in links(resolve(target), axes)]


@pytest.mark.parametrize(
    ("target", "sizes", "expected"),
    [
        # Only a v5e dim of 16 closes to a ring.
        ("tpu-v5e:16x16", (16, 16), [100, 100]),
        ("tpu-v5e:4x8", (4, 8), [50, 50]),
        ("tpu-v5e:8x16", (8, 16), [50, 100]),
        ("tpu-v6e:16x16", (16, 16), [200, 200]),
        # One axis over both dims has the links of both.
        ("tpu-v5e:4x8", (32,), [100]),
        ("tpu-v5e:16x16", (256,), [200]),
        # A part of a dim is a line; every fourth device shares its links with three others.
        ("tpu-v5e:16x16", (16, 4, 4), [100, 2 * 50 / 4, 50]),
        ("tpu-v5e:4x8", (8, 4), [50 + 50 / 4, 50]),
        ("tpu-v5e:4x8", (2, 16), [50 / 2, 100]),
        # Three dims close together, or none.
        ("tpu-v5p:4x4x4", (4, 4, 4), [200, 200, 200]),
        ("tpu-v5p:4x4x4", (16, 4), [400, 200]),
        ("tpu-v5p:2x4x4", (2, 4, 4), [100, 100, 100]),
        ("tpu-v4:2x2x1", (2, 2), [50, 50]),
        ("tpu-v4:4x4", (4, 4), [50, 50]),
        # A count without a shape is the most cubic one.
        ("tpu-v5e:256", (16, 16), [100, 100]),
        ("tpu-v5p:64", (4, 16), [200, 400]),
        # An axis that fits no dims is charged as one line.
        ("tpu-v5e:9", (9,), [100]),
        ("h100:8", (8,), [450]),
        ("h100:512", (64, 8), [50, 450]),
        ("h200:64", (8, 4, 2), [50, 450, 450]),
        # 8 cards of a node carry more than NVLink of an A100 does not; 2 cards carry 50 GB/s each on an H100.
        ("h100:64", (64,), [400]),
        ("h100:64", (4, 16), [50, 400]),
        ("h100:64", (16, 4), [100, 450]),
        ("a100:64", (64,), [200]),
        ("cpu:8", (2, 4), [CHIPS["cpu"].link_bytes_s / 1e9] * 2),
    ],
)  # fmt: skip
def test_rates(target, sizes, expected):
    assert rates(target, *sizes) == pytest.approx(expected)


def test_groups_over_several_axes():
    axes = (("a", 4), ("b", 4), ("c", 4))
    v5p, h100 = resolve("tpu-v5p:4x4x4"), resolve("h100:64")
    assert link_over(v5p, axes, ("a", "c")).bytes_s == 400e9
    assert link_over(h100, axes, ("b", "c")).bytes_s == 2 * 4 * 50e9  # 8 in each of 2 nodes
    assert link_over(h100, axes, ("a", "b", "c")).bytes_s == 400e9
    assert link_over(h100, axes, (), 8).name == "switch"
    assert link_over(h100, axes, ()).latency_s == 0


def test_parts_of_an_axis():
    h100 = resolve("h100:64")
    axes = (("a", 64),)
    assert link_over(h100, axes, ("a:(8)8",)).bytes_s == 450e9  # the minor part stays in its node
    assert link_over(h100, axes, ("a:(1)8",)).bytes_s == 50e9
    assert link_over(resolve("tpu-v5e:8x16"), (("a", 128),), ("a:(8)16",)).name == "ring of 16"


def test_parts_of_one_dim_join():
    axes = (("a", 4), ("b", 4), ("c", 16))
    assert link_over(resolve("tpu-v5e:16x16"), axes, ("a", "b")).name == "ring of 16"


@pytest.mark.parametrize(("count", "node"), [(64, 8), (64, 64)])
def test_all_to_all(count, node):
    """What leaves the node goes by one's own card."""
    sent = 63.0
    link = link_over(resolve("h100:64"), (("a", count // node), ("b", node)), ("a", "b"))
    assert link.seconds("all-to-all", sent) - link.latency_s == pytest.approx(56 / 50e9 + 7 / 450e9)


def test_all_to_all_on_a_torus():
    ring = link_over(resolve("tpu-v5e:16x16"), (("a", 16), ("b", 16)), ("b",))
    assert ring.exchange_bytes_s == 100e9 / 4  # a quarter of the array's bytes cross each half of the ring
    assert ring.latency_s == 8e-6
    line = link_over(resolve("tpu-v5e:8x8"), (("a", 8), ("b", 8)), ("b",))
    assert (line.exchange_bytes_s, line.latency_s) == (50e9 / 2, 7e-6)


def test_a_chip_of_ones_own():
    target = MINE.pod(16)
    assert (target.count, target.platform, target.name, target.is_here) == (16, "cuda", "mine:16", False)
    assert resolve(target) is target
    assert [x.name for x in links(target, (("a", 4), ("b", 4)))] == ["network", "switch"]
    with pytest.raises(DeviceError, match=r"pod\(8\)"):
        resolve(MINE)


@pytest.mark.parametrize("size", ["", "4x", "x", 0, "0x4", -3, "four", None])
def test_what_is_no_size(size):
    with pytest.raises(DeviceError, match="no size of a pod"):
        MINE.pod(size)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"flops": 0.0}, "positive `flops`"),
        ({"link_bytes_s": math.inf}, "positive `link_bytes_s`"),
        ({"memory_bytes": -1.0}, "positive `memory_bytes`"),
        ({"platform": "npu"}, "no platform 'npu'"),
        ({"network_bytes_s": 0.0}, "no network"),
    ],
)
def test_what_is_no_chip(wrong, text):
    fields = {name: getattr(MINE, name) for name in MINE.__dataclass_fields__} | wrong
    with pytest.raises(DeviceError, match=text):
        Chip(**fields)


def test_a_chip_in_a_file(tmp_path, monkeypatch):
    path = tmp_path / "new" / "cpu.json"
    mine = Chip("cpu", "cpu", 1e10, 2e10, 3e9, 4e9, 5e-5, "here", dtype_flops=(("bf16", 1e9),))
    save_chip(mine, path)
    assert load_chip(path) == mine
    monkeypatch.setenv("SHARDFN_CHIPS", str(path.parent))
    assert resolve("cpu:16").chip == resolve("cpu").chip == mine
    assert resolve("h100:8").chip is CHIPS["h100"]
    monkeypatch.setenv("SHARDFN_CHIPS", "")
    assert resolve("cpu").chip is CHIPS["cpu"]


@pytest.mark.parametrize("text", ["", "{}", '{"chip": {"name": "x"}}', '{"chip": 3}', '{"chip": {"nonsense": 3}}'])
def test_what_is_no_chip_file(tmp_path, monkeypatch, text):
    (tmp_path / "cpu.json").write_text(text)
    monkeypatch.setenv("SHARDFN_CHIPS", str(tmp_path))
    with pytest.raises(DeviceError, match="no chip can be read"):
        resolve("cpu")


@pytest.mark.parametrize(
    ("count", "dims", "expected"),
    [(8, 2, (2, 4)), (64, 2, (8, 8)), (512, 3, (8, 8, 8)), (256, 3, (4, 8, 8)), (16, 3, (2, 2, 4)), (1, 3, (1, 1, 1))],
)
def test_most_cubic(count, dims, expected):
    assert most_cubic(count, dims) == expected


def test_the_torus_of_devices():
    def at(*coords):
        return types.SimpleNamespace(coords=coords)

    box = [at(x, y, 0) for y in range(2) for x in range(4)]
    assert torus(box) == (1, 2, 4)
    assert torus(box[::-1]) == () == torus([at()]) == torus([types.SimpleNamespace()]) == torus(box[:3] + box[4:])
