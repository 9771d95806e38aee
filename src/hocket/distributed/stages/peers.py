"""A job of equal ranks, each connected with all others."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.distributed.membership import Membership, connected
from hocket.distributed.wire import Wire
from hocket.errors import PeerError

__all__ = ["Peers"]


class Peers(Membership):
    """A process's place in a job of equal ranks.

    Example:
        >>> Peers(0, 2, 0, None, 1.0).name(1)
        'rank 1'
    """

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.num_workers) if rank != self.rank)

    def wires(self) -> list[Wire]:
        """A wire to each of the others; raises `PeerError` if one does not answer within the timeout."""
        found = []
        for other in self.others:
            low, high = sorted((self.rank, other))
            key, place = f"hocket/wire/{low}/{high}", int(self.rank == high)
            found.append(
                connected(self.store, key, place, self.name(self.rank), self.name(other), self.timeout_s),
            )
        return found

    def leave(self, wires: Mapping[int, Wire], error: BaseException | None) -> None:
        """Take leave of all ranks, when they have what they were told; with an error, they fail, and can read why.

        Raises:
            PeerError: without an error, a rank is gone that does not have it.
        """
        if error is not None:
            self.fail(error)
        for wire in wires.values() if error is None else ():
            wire.flush()
        for wire in wires.values():
            wire.close(reason=str(error) if error is not None else "")

    def failed(self, wires: Mapping[int, Wire], error: BaseException) -> PeerError:
        """Take leave after an error; what to raise for it names the rank that failed first."""
        first = self.first_failure()
        self.leave(wires, error)
        text = self.signed(error)
        return PeerError(text if first is None or first in text else f"{text}; the first to fail was {first}")
