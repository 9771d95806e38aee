"""The properties of TicTac, section 4.1 (Algorithm 1), updated while one recv after another is chosen.

With R the recvs that are still outstanding:

    op.M        time of the outstanding recvs that the op depends on
    recv.P      time of the ops that depend on this recv and on no other outstanding one
    recv.M+     the least M among ops that depend on this recv and on at least one other outstanding one

Ops come as groups (`hocket.planning.transfers.receives`). Times are multiples of a small unit, so that equal values
stay equal after any number of subtractions: ties are frequent in the paper's comparator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hocket.planning.transfers.receives import Receives

# M+ of a recv that no op needs together with another one.
NEVER = int(np.iinfo(np.int64).max)

# The sum of all times stays below two to the power of this.
BITS = 61


@dataclass(frozen=True)
class Properties:
    """The time, P and M+ of each recv, in whole units, without meaning for recvs that have arrived.

    Attributes:
        times: M of the recvs.
        loads: P.
        impending: M+, `NEVER` if no op needs this recv and another outstanding one.
    """

    times: Sequence[int]
    loads: Sequence[int]
    impending: Sequence[int]


class Outstanding:
    """The recvs that are still to come."""

    def __init__(self, receives: Receives, times: Sequence[int], works: Sequence[int]) -> None:
        self._count = len(receives)
        self._recvs = np.arange(len(receives))  # those that are outstanding: the columns of what follows
        self._times = np.array(times, np.int64)
        self._works = np.array(works, np.int64)
        self._members = receives.members
        self._counts = self._members.sum(axis=1)
        self._left = self._members @ self._times  # M of each group
        self._keep(np.full(len(receives), True))

    def properties(self) -> Properties:
        """M, P and M+ of the recvs."""
        alone = self._counts == 1
        several = ~alone
        left = np.where(self._members[several], self._left[several, None], NEVER)
        return Properties(
            self._spread(self._times),
            self._spread(self._works[alone] @ self._members[alone]),
            self._spread(left.min(axis=0, initial=NEVER)),
        )

    def complete(self, recv: int) -> None:
        """Mark this recv as arrived."""
        at = int(np.searchsorted(self._recvs, recv))
        waiting = self._members[:, at]
        self._counts[waiting] -= 1
        self._left[waiting] -= self._times[at]
        self._keep(self._recvs != recv)

    def _keep(self, columns: npt.NDArray[np.bool_]) -> None:
        """Keep only these recvs, and the groups that wait for one of them."""
        rows = self._counts > 0
        self._members = self._members[rows][:, columns]
        self._counts, self._left, self._works = self._counts[rows], self._left[rows], self._works[rows]
        self._recvs, self._times = self._recvs[columns], self._times[columns]

    def _spread(self, values: npt.NDArray[np.int64]) -> list[int]:
        """Values of outstanding recvs as values of all recvs, with `NEVER` for the others."""
        found = np.full(self._count, NEVER, np.int64)
        found[self._recvs] = values
        return found.tolist()


def in_units(*durations_us: Sequence[float]) -> list[list[int]]:
    """Durations in whole units, where the unit is the smallest power of two of a microsecond that 64 bits allow."""
    total = sum(math.fsum(us) for us in durations_us)
    exponent = BITS - max(0, math.frexp(total)[1])
    return [[round(math.ldexp(us, exponent)) for us in row] for row in durations_us]
