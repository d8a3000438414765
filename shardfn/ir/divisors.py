"""Prime factors and divisors, of sizes and device counts."""

from __future__ import annotations

import math


def primes(n: int) -> list[int]:
    """The prime factors of `n`, smallest first.

    >>> primes(24)
    [2, 2, 2, 3]
    """
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p = p + 1 if p * p <= n else n
    return found


def divisors(n: int) -> list[int]:
    """The divisors of `n`, smallest first.

    >>> divisors(30)
    [1, 2, 3, 5, 6, 10, 15, 30]
    """
    small = [d for d in range(1, math.isqrt(max(n, 0)) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
