"""Versions of the parameters for agents: which values belong to one, who has them, and what is kept of old ones.

Rank 0 publishes: it orders all servers to copy what they have between the same two steps. So a version is whole by
construction, and its number, the steps before it, is the same at all servers. They keep the last few; an older one
stays in memory only as long as it is on its way to an agent.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.distributed.description import kind_in_words
from hocket.distributed.parts import Assignment
from hocket.errors import PeerError
from hocket.tracing.captured import Captured
from hocket.tracing.state import Entry

__all__ = [
    "KEPT_VERSIONS",
    "NEWEST",
    "Value",
    "Version",
    "Versions",
    "model_values",
    "of_server",
    "ordered_values",
    "values_told",
]

KEPT_VERSIONS = 2
NEWEST = -1


@dataclass(frozen=True)
class Value:
    """A parameter or a buffer as agents get it.

    Attributes:
        name: in the model.
        kind: dtype and shape, in words.
        size_bytes: of the value.
        server: number of the server that has it.
        changes: whether the step writes it; what it does not write is sent once.
        from_worker: whether worker 0 gives it to the server when it publishes, or else the server has it.
    """

    name: str
    kind: str
    size_bytes: int
    server: int
    changes: bool
    from_worker: bool

    @property
    def told(self) -> list[Any]:
        """What agents read of it in the store."""
        return [self.name, self.kind, self.size_bytes, self.server, self.changes]


@dataclass(frozen=True)
class Version:
    """What one server has of a version: values as they were after so many steps, and those that never change."""

    number: int
    values: Mapping[str, torch.Tensor]
    fixed: Mapping[str, torch.Tensor]


class Versions:
    """The versions that a server has; agents' threads take them, the server's own publishes.

    Example:
        >>> versions = Versions(kept=1)
        >>> versions.publish(Version(3, {}, {}))
        >>> versions.publish(Version(5, {}, {}))
        >>> versions.take(3) is None, versions.take(NEWEST).number, versions.there()
        (True, 5, (5, 5))
    """

    def __init__(self, kept: int = KEPT_VERSIONS) -> None:
        self._kept = kept
        self._versions: dict[int, Version] = {}
        self._closed = False
        self._changed = threading.Condition()

    def publish(self, version: Version) -> None:
        """Add the newest one; the oldest goes."""
        with self._changed:
            self._versions[version.number] = version
            while len(self._versions) > self._kept:
                del self._versions[min(self._versions)]
            self._changed.notify_all()

    def take(self, number: int) -> Version | None:
        """A version, or the newest; waits for one that is to come. None: it is gone, or the server is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or max(self._versions, default=NEWEST - 1) >= number)
            if number == NEWEST and self._versions:
                number = max(self._versions)
            return self._versions.get(number)

    def there(self) -> tuple[int, int]:
        """The numbers of the oldest and of the newest one; `NEWEST` where there is none."""
        with self._changed:
            return min(self._versions, default=NEWEST), max(self._versions, default=NEWEST)

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def model_values(captured: Captured, assignment: Assignment) -> dict[str, tuple[Value, Entry]]:
    """All parameters and buffers of what is trained, with their places at this rank."""
    places, graph = captured.trace.places, captured.graph
    home = {each.buffer: each.server for each in assignment.pulls}
    for server, names in enumerate(assignment.server_ops):
        for name in names:
            home.update(dict.fromkeys(graph[name].writes, server))
    written = {buffer for op in graph.ops for buffer in op.writes} | {e.name for e in captured.trace.rebound}
    found = {}
    for entry in (*places.parameters, *places.tensors):
        if entry.kind in ("parameter", "buffer"):
            tensor = entry.get()
            size, name = tensor.numel() * tensor.element_size(), entry.name
            value = Value(name, kind_in_words(tensor), size, home.get(name, 0), name in written, name not in home)
            found[name] = (value, entry)
    return found


def values_told(told: Any, num_servers: int, mine: Mapping[str, torch.Tensor]) -> list[Value]:
    """What the job says of its values, checked: an agent's own are among them, and of the same kind.

    Raises:
        PeerError: a value that the job does not have, or has in another shape or dtype, or words that mean nothing.
    """
    found = [_value(each, num_servers) for each in told] if isinstance(told, list) else []
    theirs = {value.name: value for value in found}
    for name, tensor in mine.items():
        here, there = kind_in_words(tensor), theirs[name].kind if name in theirs else "missing"
        if here != there or theirs[name].size_bytes != tensor.numel() * tensor.element_size():
            raise PeerError(f"agent: {name!r} is {here} here, and {there} in the job")
    return found


def ordered_values(values: Sequence[Value], indices: Sequence[int]) -> list[Value]:
    """The values that an agent wants, in its order; it says their places among all, and then -1.

    Raises:
        PeerError: a place that does not exist, or twice the same.
    """
    wanted = [index for index in indices if index != -1]
    if len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(len(values))):
        raise PeerError("it orders values that do not exist")
    return [values[index] for index in wanted]


def of_server(values: Collection[Value], server: int, *, changes: bool) -> list[Value]:
    """The values that one server has and that change, or that do not."""
    return [value for value in values if value.server == server and value.changes == changes]


def _value(told: Any, num_servers: int) -> Value:
    kinds = (str, str, int, int, bool)
    if not isinstance(told, list) or [type(each) for each in told] != list(kinds):
        raise PeerError(f"agent: the job says something unknown of a value: {told!r}")
    name, kind, size_bytes, server, changes = told
    if size_bytes < 0 or not 0 <= server < num_servers:
        raise PeerError(f"agent: the job says something unknown of {name!r}: {size_bytes} bytes on server {server}")
    return Value(name, kind, size_bytes, server, changes, from_worker=False)
