"""Native ops that a step may be lowered with in place of torch's, by the names that forms have for them.

They round otherwise than torch's, so only forms that need not be bitwise have them.
"""

from __future__ import annotations

__all__ = ["FUSED_NORM", "MIN_CHANNELS", "NATIVE_OPS", "WINOGRAD"]

NATIVE_OPS = FUSED_NORM, WINOGRAD = "fused-norm", "winograd"

# Of a convolution by Winograd's algorithm, on both sides: with fewer, most of a vector would be zeros.
MIN_CHANNELS = 8
