"""The reference is complete: every option, context key, flag, error, chip and public name stands on its page."""

import argparse
import dataclasses
import importlib
import inspect
import pathlib
import re

import pytest

import shardfn
import shardfn.errors
import shardfn.mindspore.context_keys as keys
from shardfn import checkpoint, data, train
from shardfn.cli.main import _parser
from shardfn.cost.devices.chips import CHIPS
from shardfn.frontend.options import Options

REFERENCE = pathlib.Path(__file__).parent.parent / "docs" / "reference"


def coded(page: str) -> set[str]:
    """What a page shows as code: the words in backticks, and those of its first column's entries."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"[\s,|/\"=(){}:\[\]]+", code)}


@pytest.mark.parametrize(
    "function", [shardfn.shard, train.step, train.pipeline, train.recompute, checkpoint.save, checkpoint.restore, data.load],
    ids=lambda f: f"{f.__module__}.{f.__name__}",
)  # fmt: skip
def test_options_has_every_option(function):
    parameters = [p for p in inspect.signature(function).parameters.values() if p.default is not p.empty]
    assert {p.name for p in parameters} - {"fn"} <= coded("options.md")
    assert {field.name for field in dataclasses.fields(Options)} <= coded("options.md")


def test_context_has_every_key():
    assert {*keys.AUTO_PARALLEL_KEYS, *keys.RUN_KEYS, *keys.ALGO_KEYS, *keys.PS_KEYS} <= coded("context.md")


def test_command_line_has_every_command_and_flag():
    def flags(parser: argparse.ArgumentParser) -> set[str]:
        found = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= set(action.choices).union(*map(flags, action.choices.values()))
        return found

    assert flags(_parser()) - {"--help"} <= coded("command-line.md")


def test_errors_has_every_error():
    errors = {name for name, value in vars(shardfn.errors).items() if inspect.isclass(value) and issubclass(value, Exception)}  # fmt: skip
    assert errors - {"ShardError"} <= coded("errors.md")


def test_devices_has_every_chip():
    rows = set(re.findall(r"^\| ([\w-]+) \|", (REFERENCE / "devices.md").read_text(encoding="utf-8"), re.M))
    assert set(CHIPS) <= rows


def test_reports_has_every_key_of_the_data():
    import jax

    report = shardfn.explain(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
    assert set(report.to_dict()) - {"schema"} <= coded("reports.md")


@pytest.mark.parametrize("package", ["shardfn", "shardfn.train", "shardfn.data", "shardfn.checkpoint",
                                     "shardfn.cluster", "shardfn.cluster.kubernetes", "shardfn.mindspore",
                                     "shardfn.embedding", "shardfn.experts", "shardfn.halo", "shardfn.layoutfile",
                                     "shardfn.draw"])  # fmt: skip
def test_every_public_function_has_an_example(package):
    module = importlib.import_module(package)
    without = [name for name in module.__all__
               if inspect.isfunction(value := getattr(module, name)) and ">>>" not in (value.__doc__ or "")]  # fmt: skip
    assert not without
