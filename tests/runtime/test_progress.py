"""Long work shows a line in a terminal and in a notebook, and none elsewhere."""

import io
import logging
import re
import sys
import time
import types

import pytest

from shardfn.runtime import progress as module
from shardfn.runtime.progress import progress


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    monkeypatch.setattr(module, "EACH_S", 0.02)
    monkeypatch.setattr(module, "LOGGED_S", 0.02)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_terminal_shows_what_and_how_long(quick, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress("planning step"):
        time.sleep(0.1)
    assert re.search(r"planning step: \d+ s", sys.stderr.getvalue())


def test_progress_in_a_pipe_is_silent(quick, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("planning step"):
        time.sleep(0.05)
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("is_a_person", [True, False])
def test_progress_in_a_notebook_stands_below_the_cell_and_goes_away(quick, monkeypatch, is_a_person):
    shown = []
    handle = types.SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return handle

    kernel = types.SimpleNamespace(_allow_stdin=is_a_person)
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=kernel)
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("planning step"):
        time.sleep(0.1)
    assert (shown[:1], shown[-1:]) == ((["planning step: 0 s"], [""]) if is_a_person else ([], []))


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_progress_is_logged_where_somebody_listens(quick, caplog, monkeypatch, level):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(level, "shardfn"), progress("planning step") as say:
        say("local search")
        time.sleep(0.1)
    said = [record.getMessage() for record in caplog.records]
    if level == logging.WARNING:
        assert said == []
    else:
        assert re.fullmatch(r"planning step: \d+ s, local search", said[0])
        assert re.fullmatch(r"planning step: done after \d+ s", said[-1])


def test_progress_of_quick_work_logs_nothing(caplog, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, "shardfn"), progress("planning step"):
        pass
    assert not caplog.records
