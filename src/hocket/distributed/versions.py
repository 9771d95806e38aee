"""Versions of the parameters for agents: their values, where they are, and how long old ones are kept.

Rank 0 publishes: it orders all servers to copy their values between the same two steps. So a version is consistent by
construction, and its number, which is the number of steps before it, is the same at all servers. They keep the last few
versions. An older one stays in memory only while it is being sent to an agent.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.distributed.description import kind_of
from hocket.distributed.parts import Assignment
from hocket.errors import PeerError
from hocket.tracing.captured import Captured
from hocket.tracing.state import Entry

KEPT_VERSIONS = 2
NEWEST = -1


@dataclass(frozen=True)
class Value:
    """A parameter or a buffer that agents receive.

    Attributes:
        name: name in the model.
        kind: dtype and shape, as text.
        size_bytes: size of the value.
        server: number of the server that has it.
        changes: True if the step writes it. Other values are sent once.
        from_worker: True if worker 0 gives it to the server when it publishes, since no server updates it.
    """

    name: str
    kind: str
    size_bytes: int
    server: int
    changes: bool
    from_worker: bool

    @property
    def as_list(self) -> list[Any]:
        """The fields that agents read in the store."""
        return [self.name, self.kind, self.size_bytes, self.server, self.changes]

    @property
    def pull_name(self) -> str:
        """The name of a changing value on the wire, and in an agent's plan."""
        return f"pull:{self.name}"

    @property
    def fixed_name(self) -> str:
        """The name on the wire of a value that is sent once."""
        return f"fixed:{self.name}"


@dataclass(frozen=True)
class Version:
    """One server's values of a version: those that steps change, and those that never change."""

    number: int
    values: Mapping[str, torch.Tensor]
    fixed: Mapping[str, torch.Tensor]


class Versions:
    """The versions of a server. It publishes them, and threads that serve agents take them.

    Example:
        >>> versions = Versions(kept=1)
        >>> versions.publish(Version(3, {}, {}))
        >>> versions.publish(Version(5, {}, {}))
        >>> versions.take(3) is None, versions.take(NEWEST).number, versions.range()
        (True, 5, (5, 5))
    """

    def __init__(self, kept: int = KEPT_VERSIONS) -> None:
        self._kept = kept
        self._versions: dict[int, Version] = {}
        self._closed = False
        self._changed = threading.Condition()

    def publish(self, version: Version) -> None:
        """Add the newest version, and drop the oldest."""
        with self._changed:
            self._versions[version.number] = version
            while len(self._versions) > self._kept:
                del self._versions[min(self._versions)]
            self._changed.notify_all()

    def take(self, number: int) -> Version | None:
        """Wait for a version, or for any. Return None if it was dropped, or the server is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or max(self._versions, default=NEWEST - 1) >= number)
            if number == NEWEST and self._versions:
                number = max(self._versions)
            return self._versions.get(number)

    def range(self) -> tuple[int, int]:
        """The numbers of the oldest and of the newest version, or `NEWEST` twice if there is none."""
        with self._changed:
            return min(self._versions, default=NEWEST), max(self._versions, default=NEWEST)

    def close(self) -> None:
        """End all waits in `take`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def model_values(captured: Captured, assignment: Assignment) -> dict[str, tuple[Value, Entry]]:
    """All parameters and buffers of the model, with their places at this rank."""
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
            size, name = tensor.nbytes, entry.name
            value = Value(name, kind_of(tensor), size, home.get(name, 0), name in written, name not in home)
            found[name] = (value, entry)
    return found


def announced_values(announced: Any, num_servers: int, mine: Mapping[str, torch.Tensor]) -> list[Value]:
    """The values that a job announces, checked against an agent's own.

    Raises:
        PeerError: the job lacks a value, has it in another shape or dtype, or announces something malformed.
    """
    found = [_value(each, num_servers) for each in announced] if isinstance(announced, list) else []
    theirs = {value.name: value for value in found}
    for name, tensor in mine.items():
        here, there = kind_of(tensor), theirs[name].kind if name in theirs else "missing"
        if here != there or theirs[name].size_bytes != tensor.nbytes:
            raise PeerError(f"agent: {name!r} is {here} here, and {there} in the job")
    return found


def ordered_values(values: Sequence[Value], indices: Sequence[int]) -> list[Value]:
    """The values that an agent wants, in its order. Trailing indices of -1 fill up the message.

    Raises:
        PeerError: an index is out of range, or is given twice.
    """
    wanted = [index for index in indices if index != -1]
    if len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(len(values))):
        raise PeerError("it orders values that do not exist")
    return [values[index] for index in wanted]


def of_server(values: Collection[Value], server: int, *, changes: bool) -> list[Value]:
    """The changing, or the fixed, values of one server."""
    return [value for value in values if value.server == server and value.changes == changes]


def _value(announced: Any, num_servers: int) -> Value:
    if not isinstance(announced, list) or [type(each) for each in announced] != [str, str, int, int, bool]:
        raise PeerError(f"agent: the job says something unknown of a value: {announced!r}")
    name, kind, size_bytes, server, changes = announced
    if size_bytes < 0 or not 0 <= server < num_servers:
        raise PeerError(f"agent: the job says something unknown of {name!r}: {size_bytes} bytes on server {server}")
    return Value(name, kind, size_bytes, server, changes, from_worker=False)
