"""What a collective costs: bytes that one device sends."""

from __future__ import annotations

from shardfn.ir.partitioned import Communication, PartitionedProgram

COLLECTIVE_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def bytes_sent(kind: str, group_size: int, operand_bytes: int) -> int:
    """Bytes one device sends for one collective, with ring algorithms (bandwidth-optimal: Chan et al. 2007).

    Args:
      kind: one of `COLLECTIVE_KINDS`.
      group_size: devices that take part, `n`.
      operand_bytes: bytes of the operand on each device, `b`.

    Returns:
      all-gather `(n-1)·b`; reduce-scatter and all-to-all `(n-1)/n·b`; all-reduce `2(n-1)/n·b`;
      collective-permute `b`. One device sends nothing.

    >>> bytes_sent("all-reduce", 4, 1000)
    1500
    """
    n, b = group_size, operand_bytes
    if n <= 1:
        return 0
    return {
        "all-reduce": 2 * (n - 1) * b // n,
        "all-gather": (n - 1) * b,
        "reduce-scatter": (n - 1) * b // n,
        "all-to-all": (n - 1) * b // n,
        "collective-permute": b,
    }[kind]


def communication_bytes(partitioned: PartitionedProgram, c: Communication) -> int:
    """Bytes one device sends each time a communication of a program runs, in all permutes of a collective matmul."""
    if c.matmul_permutes:
        return c.matmul_permutes * bytes_sent("collective-permute", c.group_size, partitioned.local_bytes(c.shard))
    return bytes_sent(c.kind, c.group_size, partitioned.local_bytes(c.operand))
