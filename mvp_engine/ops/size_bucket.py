"""Size buckets: kernels that are compiled or planned per size see few sizes."""

from __future__ import annotations


def round_up_to_bucket(n: int, smallest: int) -> int:
    """The smallest bucket that holds `n`. Buckets are `smallest` times 1, 1.5, 2, 3, 4, 6, 8, ..."""
    size = smallest
    while size < n:
        if size * 3 // 2 >= n:
            return size * 3 // 2
        size *= 2
    return size
