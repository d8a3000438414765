"""Static movement along dimensions as shifts of arrays of one size and selects by position.

A slice, a pad, a concatenation, an update or a gather at constant places says for each row of its result which row of which
operand, or which constant, is there. Such maps compose (`values`). An array that is a few rows shorter or longer than the
array that it comes from need not be made: ops on its elements are computed in the place of that array, whose shards are even,
on operands that are shifted by the difference of their places (`frames`, `emit`). XLA's partitioner turns a shift into an
exchange with the neighbouring shards, and a select by position into no communication, and computes both correctly. For a
slice, a pad or a scatter whose result has uneven shards it does neither.

`rules` has one row for each primitive. What has none, and what moves too far, is computed as the user wrote it. Once the shards
are known, arrays that come from one array share its halo (`shared_halos`).
"""

from shardfn.movement.rewrite import is_still, shifted, with_shifts
from shardfn.movement.rotation import Turn, is_rotation, rotated, turns, with_rotations_back
from shardfn.movement.shared_halos import Shards, shares_halos, with_shared_halos

__all__ = [
    "Shards", "Turn", "is_rotation", "is_still", "rotated", "shares_halos", "shifted", "turns", "with_rotations_back",
    "with_shared_halos", "with_shifts",
]  # fmt: skip
