"""What MindSpore 2.10.0's context accepts, against ours. Every difference is in a table, with its reason."""

import ast
import json
import pathlib

import pytest

from shardfn.errors import ContextError, ContextTypeError, NotAvailableError
from shardfn.mindspore.context import get_auto_parallel_context, set_auto_parallel_context

CASES = json.loads((pathlib.Path(__file__).parent / "context.json").read_text())["cases"]
KINDS = {None: None, "ValueError": ContextError, "KeyError": ContextError, "TypeError": ContextTypeError}

DEVIATIONS = {  # decided otherwise, for good
    "{'comm_fusion': {'allreduce': {'mode': 'auto'}}}": (None, "that mode has one config, None: it may be left out"),
    "{'device_num': True}": (ContextTypeError, "MindSpore takes True for 1; a bool here is a slip"),
    "{'all_reduce_fusion_config': [-3, 5]}": (
        ContextError,
        "an int of the wrong value; MindSpore's binding says TypeError",
    ),
    "{'pipeline_config': {'pipeline_interleave': False, 'pipeline_scheduler': 'gpipe'}}": (
        ContextError,
        "a str of the wrong value; MindSpore says TypeError",
    ),
}


def outcome(settings):
    try:
        set_auto_parallel_context(**settings)
    except (ContextError, ContextTypeError, NotAvailableError) as error:
        return type(error)
    return None


def test_all_cases_are_here():
    assert len(CASES) == 43
    assert set(DEVIATIONS) <= {case["args"] for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["args"])
def test_as_mindspore_or_as_the_table_says(case):
    settings = ast.literal_eval(case["args"])
    measured = KINDS[case["error"]]
    assert case["accepted"] == (measured is None)
    expected, _ = DEVIATIONS.get(case["args"], (measured, ""))
    if case["args"] in DEVIATIONS:
        assert expected is not measured, "no deviation any more: take it out of the table"
    assert outcome(settings) is expected
    if expected is None:
        for key, value in settings.items():
            found = get_auto_parallel_context(key)
            assert found == (
                {**found, **value} if isinstance(value, dict) else value
            )  # a dict's other entries: defaults
