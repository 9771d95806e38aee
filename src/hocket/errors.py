"""Every error Hocket raises on purpose.

One family, so that ``except hocket.errors.HocketError`` catches what Hocket refuses and nothing else. Each error
restates the user's input: the file, the op, the field, and what was expected there.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "ExecutionError",
    "FormatError",
    "HocketError",
    "InputError",
    "MissingDependencyError",
    "PeerError",
    "PlanError",
    "StaleCaptureError",
    "VersionGoneError",
]


class HocketError(Exception):
    """The base of all errors raised by Hocket."""


class InputError(HocketError, ValueError):
    """An argument or a value that cannot be worked with."""


class FormatError(InputError):
    """A file or text that does not read: names the source, the place in it, and what was expected."""

    def __init__(self, source: str, where: str, message: str) -> None:
        self.source = source
        self.where = where
        super().__init__(f"{source}: {where}: {message}" if where else f"{source}: {message}")


class PlanError(HocketError, ValueError):
    """A plan that may not run: names the op (or the lane) at fault."""

    def __init__(self, message: str, *, op: str | None = None, lane: str | None = None) -> None:
        self.op = op
        self.lane = lane
        super().__init__(message)


class CaptureError(HocketError):
    """A training step that cannot become a graph, with a reason that a person can act on."""


class ExecutionError(HocketError):
    """The executor was used in a way it does not support, or stopped before the step was done."""


class StaleCaptureError(ExecutionError):
    """A number that the step branches on has changed since the capture. No op was run."""


class PeerError(ExecutionError):
    """Another process of the same job is gone, silent, or runs something else: names its rank."""


class VersionGoneError(InputError):
    """A version of the parameters that the servers no longer have, or never had. Names it and those they have."""


class MissingDependencyError(HocketError, ImportError):
    """An optional package is not installed. The message is one line with the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'hocket[{extra}]'")
