"""The process that reads standard error while XLA compiles: it keeps the lines that were asked for, and passes all else on.

It runs as a script, `python forward_log.py PATTERN END`, and imports nothing of shardfn. As another process has this end of
the pipe, what XLA says before it ends the compiling process is passed on too.
"""

from __future__ import annotations

import os
import re
import select
import sys

WAIT_S = 0.05
"""How long the beginning of a line waits for its rest."""


def forward(pattern: str, end: str, source: int = 0, target: int = 2, reply: int = 1) -> None:
    """Copy until the source ends. At `end`, write what was kept to `reply` and close it; from there on all is copied.

    Args:
      pattern: a regular expression of what is kept, with its line end.
      end: a line that nobody else writes.
      source: the file descriptor to read.
      target: the one to pass on to.
      reply: the one for what was kept. A line end says that all is ready.
    """
    wanted, kept, rest = re.compile(pattern.encode()), list[bytes](), b""
    _write(reply, b"\n")  # ready
    while True:
        rest = _sooner(rest, source, target)
        read = os.read(source, 1 << 16)
        data, is_end, after = (rest + read).partition(f"{end}\n".encode())
        line_end = len(data) if is_end or not read else data.rfind(b"\n") + 1
        data, rest = data[:line_end], data[line_end:]
        kept += (found.group() for found in wanted.finditer(data))
        _write(target, wanted.sub(b"", data))
        if is_end or not read:
            break
    _write(reply, b"".join(kept))
    os.close(reply)
    _write(target, after)
    while read := os.read(source, 1 << 16):
        _write(target, read)


def _sooner(rest: bytes, source: int, target: int) -> bytes:
    """The beginning of a line, or nothing if it was written because no more came in time."""
    if not rest or select.select([source], [], [], WAIT_S)[0]:
        return rest
    _write(target, rest)
    return b""


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


if __name__ == "__main__":
    forward(sys.argv[1], sys.argv[2])
