"""XLA's warnings of full rematerialisation in this process: a note takes their place, and all else stays on standard error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.compiled.log_capture import captured_rematerialisations

WARNING = (
    "W1124 04:44:16.328965   {thread} spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot "
    "go from sharding {{devices=[8,1]<=[8]}} to {{replicated}} efficiently for HLO operation %p = f32[1,16]{{1,0}} parameter(0)"
    ', metadata={{op_name="x"}}. As the last resort, ...\n'
)
XLA_THREAD = 1
"""No thread of Python has this id."""


def warning(thread: int = XLA_THREAD) -> str:
    return WARNING.format(thread=thread)


def mlp(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


ENTRIES = (1, 4), (2, 2), (8, 1)
"""XLA knows no direct resharding for `w1`."""


def arrays():
    return jnp.ones((64, 128)), jnp.ones((128, 256)), jnp.ones((256, 64))


def test_call_whose_resharding_has_no_direct_way_writes_nothing_and_the_report_has_a_note(capfd):
    f, args = shardfn.shard(mlp, ENTRIES), arrays()
    result = f(*args)
    (note,) = f.explain(*args, compiled=True).to_dict()["compiled"]["diagnostics"]
    assert note.startswith("XLA replicates f32[64,128] of `w1` to reshard it from (2, 2) to (1, 8)")
    assert any(f"{__file__}:" in text and "full rematerialisation" in text for text in f.plan(*args).diagnostics)
    assert "rematerialization" not in capfd.readouterr().err
    assert jnp.allclose(result, mlp(*args))


def test_verify_here_takes_the_warning_too(capfd):
    found = shardfn.plan(lambda x, v, w: mlp(x, v, w), *arrays(), in_strategy=ENTRIES).verify()
    assert "XLA replicates f32[64,128] of `w1`" in str(found) or "XLA replicates f32[64,128] of `v`" in str(found)
    assert "rematerialization" not in capfd.readouterr().err


def test_a_call_without_such_a_resharding_keeps_standard_error(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("standard error was replaced"))
    shardfn.shard(lambda x: x @ x + 3.0, ((8, 1),))(jnp.ones((16, 16)))


def test_captured_warning_is_taken_and_everything_else_is_passed_on_unchanged(capfd):
    other = threading.Event()
    thread = threading.Thread(target=other.wait, args=(60,))
    thread.start()
    theirs = warning(thread.native_id or 0)
    unlike = "W0000 00:00:00.0   1 x.cc:1] [SPMD] Involuntary full rematerialization in words of a later release\n"
    rest = ["E1 something else\n", "\rspinner 50%", theirs, unlike, "\x00\xff", "é" * 70_000, "\nno line end"]
    with captured_rematerialisations() as log:
        for text in [*rest[:2], warning(), *rest[2:]]:
            os.write(2, text.encode())
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'of a child')"], check=True)
    os.write(2, b" after")
    other.set()
    thread.join()
    assert log == [warning().removesuffix("\n")]
    assert capfd.readouterr().err == "".join(rest) + "of a child after"


def test_captured_output_that_is_no_whole_line_is_passed_on_at_once(capfd):
    with captured_rematerialisations():
        os.write(2, b"half a line")
        threading.Event().wait(0.5)
        assert capfd.readouterr().err == "half a line"
    assert capfd.readouterr().err == ""


def test_captured_block_that_raises_restores_standard_error(capfd):
    with pytest.raises(KeyboardInterrupt), captured_rematerialisations():
        os.write(2, b"before\n")
        raise KeyboardInterrupt
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"


def test_captured_block_inside_another_takes_nothing(capfd):
    with captured_rematerialisations() as outer, captured_rematerialisations() as inner:
        os.write(2, warning().encode())
    assert (len(outer), inner) == (1, [])


def test_captured_output_of_a_child_that_outlives_the_block_is_passed_on(capfd):
    code = "import os, sys; sys.stdin.read(); os.write(2, b'late')"
    with captured_rematerialisations():
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    child.communicate()
    written, tries = "", 100
    while not written and (tries := tries - 1):
        threading.Event().wait(0.05)
        written = capfd.readouterr().err
    assert written == "late"


@pytest.mark.parametrize("ending", ["os.abort()", f"os.kill(os.getpid(), {int(signal.SIGKILL)})"])
def test_captured_output_before_the_process_dies_is_not_lost(ending):
    code = f"""
        import os
        from shardfn.compiled.log_capture import captured_rematerialisations
        with captured_rematerialisations():
            os.write(2, b"F0000 check failed")
            {ending}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode < 0
    assert done.stderr.startswith("F0000 check failed")


@pytest.mark.parametrize("start", ["/does/not/exist", "false"])
def test_captured_block_without_a_python_to_start_changes_nothing(start, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", start)
    with captured_rematerialisations() as log:
        os.write(2, warning().encode())
    assert (log, capfd.readouterr().err) == ([], warning())


def test_captured_block_with_standard_error_closed_changes_nothing():
    code = """
        import os
        from shardfn.compiled.log_capture import captured_rematerialisations
        os.close(2)
        with captured_rematerialisations() as log:
            print("inside", log)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "inside []\n"
