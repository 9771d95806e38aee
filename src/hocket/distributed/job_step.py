"""`JobStep`: what a step of several processes does at its end, whoever the others are: an error, or taking leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

from hocket.errors import ExecutionError, PeerError

__all__ = ["JobStep", "JoinedJob"]


class JoinedJob(Protocol):
    """A job that this process takes part in."""

    def failed(self, error: BaseException) -> PeerError:
        """Take leave after an error; what to raise for it."""


class JobStep(ABC):
    """A step that this process runs together with others: an error ends it, and is raised from then on."""

    def __init__(self) -> None:
        self._failure: PeerError | None = None
        self._closed = False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until nothing is on its way; raises `PeerError` if a rank is gone."""

    @abstractmethod
    def _joined(self) -> JoinedJob | None:
        """The job, from the first call on."""

    @abstractmethod
    def _take_leave(self) -> None:
        """Tell all others of the job that this process is done."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what runs the step."""

    def close(self) -> None:
        """Take leave of the other ranks, when all that is on its way has arrived: parameters are those after all steps.

        Raises:
            PeerError: a rank is gone.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._joined() is not None and self._failure is None:
                self.synchronize()
                self._take_leave()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._joined() is not None:
            self._failed(error)
        self.close()

    def _check_open(self) -> None:
        """Return if the step can go on.

        Raises:
            PeerError: why it has failed.
            ExecutionError: it was closed.
        """
        if self._closed or self._failure is not None:
            raise self._failure or ExecutionError("distribute: the step was closed")

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """While ranks exchange something between two steps: that one of them is gone ends the job."""
        try:
            yield
        except PeerError as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> PeerError:
        """What to raise for the error that ended the job, which is the first one."""
        if self._failure is None:
            job = self._joined()
            assert job is not None
            self._failure = job.failed(error)
        return self._failure
