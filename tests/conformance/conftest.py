"""Counts what agrees with MindSpore and what doesn't, and prints it at the end of a run."""

import collections

import pytest

KEY = "conformance"


@pytest.fixture
def tally(request):
    """Say what became of a case; it counts if the test passes."""
    return lambda outcome: request.node.user_properties.append((KEY, (request.node.path.stem, outcome)))


def pytest_terminal_summary(terminalreporter):
    passed = terminalreporter.stats.get("passed", [])
    counts = collections.Counter(
        tuple(value) for report in passed for key, value in getattr(report, "user_properties", ()) if key == KEY
    )
    if counts:
        terminalreporter.section("conformance with MindSpore 2.10")
        for (where, outcome), count in sorted(counts.items()):
            terminalreporter.line(f"{count:5}  {where[5:]:9} {outcome}")
