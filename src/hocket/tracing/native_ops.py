"""Native ops that a step may be lowered with in place of torch's, by the names that forms have for them.

They round otherwise than torch's, so only forms that need not be bitwise have them.
"""

from __future__ import annotations

from collections.abc import Sequence

NATIVE_OPS = FUSED_NORM, WINOGRAD = "fused-norm", "winograd"

# Of a convolution by Winograd's algorithm, on both sides: with fewer, most of a vector would be zeros.
_MIN_CHANNELS = 8
# Vectors of every second pixel end with it: channels fill them.
_LANES = 16


def tiles_filters(shape: Sequence[int], stride: int | None = None) -> bool:
    """Return True if there is a convolution by Winograd's algorithm for filters of this shape and this stride.

    Example:
        >>> tiles_filters((16, 8, 3, 3)), tiles_filters((16, 8, 4, 4)), tiles_filters((64, 32, 4, 4), stride=1)
        (True, False, False)
    """
    *channels, rows, columns = shape
    if (rows, columns) == (3, 3):
        return stride in (1, None) and min(channels) >= _MIN_CHANNELS
    return (rows, columns) == (4, 4) and stride in (2, None) and not any(each % _LANES for each in channels)
