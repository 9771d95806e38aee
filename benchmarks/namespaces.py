"""Two network namespaces joined by a link of a given rate: a cluster of two machines on one.

hocket-worker  [ tbf, 10.71.0.1 ]====( veth )====[ 10.71.0.2, tbf ]  hocket-server
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Namespace", "linked", "unavailable_reason"]

# What may leave at once, and how long a packet may wait in the queue: a switch with a shallow buffer.
BURST_BYTES = 64 * 1024
QUEUE_MS = 50


@dataclass(frozen=True)
class Namespace:
    """One end of the link: the namespace, its interface and its address."""

    name: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """What runs `words` in there."""
        return ["ip", "netns", "exec", self.name, *words]


def unavailable_reason() -> str | None:
    """Why there can be no namespaces here; None: they can be made."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)}, of iproute2"
    name = f"hocket-probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"ip netns add: {probe.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


@contextmanager
def linked(mbit_per_s: int) -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces with a link of this rate each way, gone afterwards.

    Raises:
        CalledProcessError: the kernel has no such link or queue.
    """
    own = os.getpid()
    ends = tuple(
        Namespace(f"hocket-{role}-{own}", f"hk{role[0]}{own}"[:15], f"10.71.0.{number}")
        for number, role in enumerate(("worker", "server"), 1)
    )
    one, other = ends
    try:
        for end in ends:
            _run("ip", "netns", "add", end.name)
        pair = (one.interface, "netns", one.name, "type", "veth", "peer", "name", other.interface, "netns", other.name)
        _run("ip", "link", "add", *pair)
        for end in ends:
            _run(*end.command("ip", "addr", "add", f"{end.address}/24", "dev", end.interface))
            _run(*end.command("ip", "link", "set", end.interface, "up"))
            _run(*end.command("ip", "link", "set", "lo", "up"))
            limit = ("rate", f"{mbit_per_s}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
            _run(*end.command("tc", "qdisc", "add", "dev", end.interface, "root", "tbf", *limit))
        yield one, other
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end.name], capture_output=True, check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
