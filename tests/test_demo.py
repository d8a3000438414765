"""`python -m shardfn demo`, started as a newcomer starts it: with nothing set in the environment."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cli import demo
from tests.processes import bare_environment

ROOT = pathlib.Path(__file__).parent.parent
SCREEN = 40
"""Lines."""


def test_the_demo():
    done = subprocess.run([sys.executable, "-m", "shardfn", "demo"], cwd=ROOT, env=bare_environment(), capture_output=True,
                          text=True, timeout=240)  # fmt: skip
    printed = done.stdout
    assert done.returncode == 0, printed[-2000:] + done.stderr
    assert printed.startswith(f"shardfn on 8 cpu devices, jax {jax.__version__}\n"), "it finds them by itself"
    assert "Both sharded runs give the losses of their unsharded runs" in printed

    rows = re.findall(r"^ *(\d+) +(\d\.\d+) +(\d\.\d+) +\S+$", printed, re.M)
    assert [int(step) for step, *_ in rows] == [*range(demo.STEPS)] * len(demo.RUNS)
    for i in range(0, len(rows), demo.STEPS):
        plain, sharded = ([float(row[k]) for row in rows[i : i + demo.STEPS]] for k in (1, 2))
        assert sharded == pytest.approx(plain, rel=demo.TOLERANCE)
        assert plain == sorted(plain, reverse=True)

    assert re.search(r"^BasicBlock: .*\ndevices: 8 x cpu, mesh a=8$", printed, re.M)
    reports = re.findall(r"^losses are equal.*?\n\n(.*?)(?=\n\n\d\. |\n\nThe whole report)", printed, re.M | re.S)
    assert len(reports) == 2 and all(text.count("\n") < SCREEN for text in reports), "each fits on a screen"
    assert all(
        text.startswith("\nCompiled: collectives") or text.startswith("Compiled: collectives") for text in reports
    )
    assert re.search(
        r"^train_step: tensor parallel over 4 × data parallel over 2\ndevices: 8 x cpu, mesh a=4 x b=2$", printed, re.M
    )
    assert "Why they differ" in printed


def test_a_loss_that_differs_is_seen(monkeypatch, capsys):
    losses = iter(([1.0, 0.5], [1.0, 0.51]))
    monkeypatch.setattr(
        demo,
        "RUNS",
        (("a run", lambda sharded: (next(losses), lambda: shardfn.explain(jnp.sin, jnp.ones(8), device="cpu:8"))),),
    )
    assert demo.run() is False
    assert "DIFFER" in capsys.readouterr().out


def test_layers_share_an_axis_and_the_batch_has_its_own():
    """Cut 4 ways in two layers and 2 ways along the batch, 8 devices must share: but not hidden dim and batch."""
    params = demo.make_params(jax.random.key(0), d=32, hidden=128, classes=16)
    made = shardfn.plan(demo.residual_mlp, params, jnp.ones((64, 32)), in_strategy=(shardfn.AUTO, (2, 1)),
                        parameter_plan=demo.SHARDED, device="cpu:8")  # fmt: skip
    assert made.mesh.axis_sizes == (4, 2)
    up = {made.decision(f"params/layers/{i}/up").spec[1] for i in range(2)}
    assert up == {("a",)}
    assert made.decision("x").spec[0] == ("b",)
