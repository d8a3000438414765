"""Kubernetes' quantities, such as "64Gi"."""

from __future__ import annotations

import re

_PATTERN = re.compile(r"(\d+\.?\d*|\.\d+)(m|k|Ki|[MGTPE]i?|[eE][-+]?\d{1,2})?", re.ASCII)


def amount(quantity: str) -> float | None:
    """The number that a quantity stands for, bytes for memory.

    Args:
      quantity: digits with a suffix, or with an exponent.

    Returns:
      The number; None for other text.

    >>> amount("65536Ki"), amount("1.5G"), amount("500m"), amount("64e9"), amount("64 GiB")
    (67108864.0, 1500000000.0, 0.5, 64000000000.0, None)
    """
    found = _PATTERN.fullmatch(quantity)
    if found is None:
        return None
    number, suffix = float(found[1]), found[2] or ""
    if suffix == "m":
        return number / 1000
    if suffix[:1] in ("e", "E") and suffix[1:] not in ("", "i"):
        return number * 10.0 ** int(suffix[1:])
    return number * (1024 if suffix.endswith("i") else 1000) ** " kMGTPE".index(suffix[:1].replace("K", "k") or " ")
