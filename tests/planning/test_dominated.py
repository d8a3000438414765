"""Entries that another sharding beats: a report says so, planning evaluates nothing for it."""

import ast
import re

import jax
import pytest

import shardfn
from shardfn.planning.questions import with_dominated_entries

S = jax.ShapeDtypeStruct
X, UP, DOWN = S((4096, 512), "float32"), S((512, 2048), "float32"), S((2048, 512), "float32")


def mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down


def layers(ps, x):
    for up, down in ps:
        x = x + mlp(x, up, down)
    return x


def found(made):
    return [text for text in with_dominated_entries(made).diagnostics if "is better than your entry" in text]


def planned(function, *args, **options):
    return shardfn.plan(function, *args, device="h100:8", **options)


@pytest.mark.parametrize(
    ("strategy", "path"),
    [(((1, 1), (1, 8), (1, 8)), "up"), (((1, 8), (8, 1), (1, 1)), "x"), (((2, 1), (1, 4), (1, 4)), "down")],
)  # fmt: skip
def test_the_suggested_entry_is_better_in_everything(strategy, path):
    made = planned(mlp, X, UP, DOWN, in_strategy=strategy)
    text = next(text for text in found(made) if text.startswith(f"`{path}`: "))
    assert f"plan.why('{path}')" in text
    other = made.what_if(ast.literal_eval(re.search(r"parameter_plan=(\{.*?\})", text)[1]))
    assert other.cost.time_s < 0.95 * made.cost.time_s and other.cost.bytes_sent < made.cost.bytes_sent
    assert other.cost.memory.peak <= made.cost.memory.peak


@pytest.mark.parametrize(
    "strategy",
    [((1, 1), (1, 8), (8, 1)), ((8, 1), (1, 1), (1, 1)), ((8, 1), (8, 1), (1, 8))],
    ids=["tensor parallel", "data parallel", "sharded weights"],
)  # fmt: skip
def test_usual_layouts_are_not_dominated_or_keep_their_promise(strategy):
    made = planned(mlp, X, UP, DOWN, in_strategy=strategy)
    for text in found(made):
        other = made.what_if(ast.literal_eval(re.search(r"parameter_plan=(\{.*?\})", text)[1]))
        assert other.cost.memory.peak <= made.cost.memory.peak and other.cost.time_s < made.cost.time_s


def test_equal_entries_of_all_layers_change_together():
    made = planned(layers, [(UP, DOWN)] * 2, X, parameter_plan={"ps/*/0": (8, 1), "ps/*/1": (8, 1), "x": (1, 8)})
    (text, *_) = found(made)
    assert text.startswith("`ps/*/0`: (1, 8) is better than your entry (8, 1)")
    other = made.what_if(ast.literal_eval(re.search(r"parameter_plan=(\{.*?\})", text)[1]))
    assert other.cost.time_s < made.cost.time_s


def test_a_report_says_it_and_a_plan_alone_does_not():
    made = planned(mlp, X, UP, DOWN, in_strategy=((1, 1), (1, 8), (1, 8)))
    assert not any("your entry" in text for text in made.diagnostics)
    assert "is better than your entry (1, 8)" in str(shardfn.explain(made))


def test_what_the_search_chose_is_not_called_an_entry():
    assert not found(planned(mlp, X, UP, DOWN, level="time"))
