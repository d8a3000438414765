"""Damage of SQLite's write-ahead log, which SQLite itself takes for the end of the log."""

from __future__ import annotations

import pathlib
import struct

from shardfn.files import open_regular


def log_damage(path: pathlib.Path) -> str:
    """What is wrong with a write-ahead log other than that its last transaction was not written to its end; "" if nothing.

    SQLite ends a log at the first frame whose checksum is another one. A transaction is synced before the next one begins, so a
    frame that a second commit follows was on disk. The format is https://www.sqlite.org/fileformat.html#walformat.

    Args:
      path: the log. Nobody writes it meanwhile.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return ""
    with file:
        header = file.read(32)
        magic, _, page_size, _, *salts = struct.unpack(">6I", header[:24].ljust(24, b"\0"))
        order = ">" if magic & 1 else "<"
        sums = _log_checksum(header[:24], order, (0, 0))
        if len(header) < 32 or magic >> 1 != 0x377F0682 >> 1 or struct.unpack(">2I", header[24:]) != sums:
            return "its header is not as it was written" if any(header) or any(file.read()) else ""
        commits, end, size = 0, 0, 24 + page_size
        while len(frame := file.read(size)) == size:
            _, is_commit, *found, first, second = struct.unpack(">6I", frame[:24])
            if not end:
                sums = _log_checksum(frame[24:], order, _log_checksum(frame[:8], order, sums))
                end = 0 if found == salts and sums == (first, second) else file.tell() - size
            is_of_this_log = found[0] == salts[0] or found[1] == salts[1]
            commits += bool(end and is_commit and is_of_this_log)
        return f"the frame at byte {end:,} is not as it was written, and later ones are" if commits > 1 else ""


def _log_checksum(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data[: len(data) // 8 * 8]))
    for one, other in zip(words, words, strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
