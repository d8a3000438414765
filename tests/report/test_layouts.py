"""`shardfn.compare`: layouts of one call in a table."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardfn
from shardfn import shard, train
from shardfn.cli.main import main
from shardfn.errors import StrategyError, StrategyTypeError

X = jax.ShapeDtypeStruct((4096, 512), "float32")
W = jax.ShapeDtypeStruct((512, 1024), "float32")


def dense(x, w):
    return x @ w


def layouts(**options):
    options = {"device": "tpu-v5e:8", **options}
    return {
        "inner": shard(dense, ((1, 8), (8, 1)), **options),
        "rows": shard(dense, ((8, 1), (1, 1)), **options),
    }


def test_the_fastest_that_fits_is_first():
    found = shardfn.compare(layouts(), X, W)
    assert [row.name for row in found.rows] == ["rows", "inner"] and found.best == "rows"
    times = [row.figures.time_s for row in found.rows if row.figures]
    assert times == sorted(times) and all(row.fits for row in found.rows)
    assert found["inner"].collectives and not found["rows"].collectives
    with pytest.raises(StrategyError, match="it has `rows`, `inner`"):
        found["columns"]


def test_what_does_not_fit_comes_last():
    x, w = jax.ShapeDtypeStruct((65536, 65536), "float32"), jax.ShapeDtypeStruct((65536, 128), "float32")
    full = shard(dense, ((1, 1), (1, 8)), device="tpu-v5e:8")  # 16 GiB and results
    found = shardfn.compare({"full": full, **layouts()}, x, w)
    assert [(row.name, row.fits) for row in found.rows][-1] == ("full", False)
    assert [row.fits for row in found.rows] == [True, True, False]


def test_what_each_sends_most_has_its_line():
    found = shardfn.compare(layouts(), X, W)
    rows, inner = found.rows
    assert rows.sends_most == ""
    assert inner.sends_most.startswith("all-reduce at test_layouts.py:") and inner.sends_most.endswith("100%")


def test_text_and_html_have_every_layout(tmp_path):
    found = shardfn.compare(layouts(), X, W)
    assert str(found) == repr(found) and len(str(found).splitlines()) == 6
    page = tmp_path / "layouts.html"
    found.save(page)
    for text in (str(found), found._repr_html_(), page.read_text()):
        assert all(word in text for word in ("rows", "inner", "sends most", "tpu-v5e:8"))
    assert page.read_text().startswith("<!doctype html>")
    with pytest.raises(StrategyError, match=r"ends in \.html or \.txt"):
        found.save(tmp_path / "layouts.csv")


def test_a_layout_without_a_plan_says_why():
    one = shard(dense, style="zero1", device="tpu-v5e:8")
    found = shardfn.compare({"zero1": one, **layouts()}, X, W)
    last = found.rows[-1]
    assert (last.name, last.plan, last.fits) == ("zero1", None, False)
    assert "zero1: style 'zero1' shards optimizer state" in str(found)
    (line,) = [line for line in str(found).splitlines() if line.startswith("zero1 ")]
    assert line.split() == ["zero1", "error"]
    with pytest.raises(StrategyError, match="shards optimizer state"):
        shardfn.compare({"zero1": one}, X, W)


def test_plans_need_no_arguments_and_steps_have_a_batch():
    plans = {name: layout.plan(X, W) for name, layout in layouts().items()}
    assert shardfn.compare(plans).best == "rows"

    def loss(params, x):
        return ((x @ params["w"]) ** 2).mean()

    steps = {mode: train.step(loss, optax.adam(1e-3), mode=mode) for mode in ("data_parallel", "semi_auto_parallel")}
    state = steps["data_parallel"].init({"w": jnp.ones((512, 64))})
    assert {row.name for row in shardfn.compare(steps, state, X).rows} == set(steps)


@pytest.mark.parametrize("given", [{}, [1], {"a": dense}, {"a": {"style": "fsdp"}}, {1: None}])
def test_what_is_no_layout_is_refused(given):
    with pytest.raises(StrategyTypeError, match="fix:   "):
        shardfn.compare(given, X, W)


def test_command_line(capsys, tmp_path):
    page = tmp_path / "layouts.html"
    call = ["compare", "jax.numpy:matmul", "--shapes", "f32[512,256]", "f32[256,256]", "--device", "tpu-v5e:8"]
    assert main([*call, "--styles", "fsdp", "tensor_parallel", "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "fsdp" in text and "tensor_parallel" in text and "zero1" not in text and page.exists()
    assert main(call) == 0
    assert "searched" in (text := capsys.readouterr().out) and "zero1: style" in text
