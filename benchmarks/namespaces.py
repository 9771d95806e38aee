"""Network namespaces joined by links of given rates: a cluster of machines on one.

namespace 0  [ tbf, 10.72.0.1 ]====( veth )====[ tbf, switch, tbf ]====( veth )====[ 10.72.0.2, tbf ]  namespace 1
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hocket.errors import InputError

# The burst that may leave at once, and the longest wait in the queue: a switch with a shallow buffer.
BURST_BYTES = 96 * 1024
QUEUE_MS = 50
CLONE_NEWNET = 0x40000000  # sched.h


@dataclass(frozen=True)
class Namespace:
    """One end of the link: the namespace, its interface and its address."""

    name: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` in the namespace."""
        return ["ip", "netns", "exec", self.name, *words]


def unavailable_reason() -> str | None:
    """Return why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
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


def needs_namespaces(what: str) -> None:
    """Raise `InputError`, which says why, where namespaces cannot be made."""
    if (reason := unavailable_reason()) is not None:
        raise InputError(f"{what} are SKIPPED: {reason}")


@contextmanager
def linked(mbit_per_s: int) -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces with a link of this rate each way, gone afterwards."""
    with switched([mbit_per_s] * 2, is_limited=False) as (_, (one, other)):
        yield one, other


@contextmanager
def switched(mbits: Sequence[int], *, is_limited: bool = True) -> Iterator[tuple[str, list[Namespace]]]:
    """A namespace for each rate, behind links of these rates (Mbit/s each way) to one switch. Gone afterwards.

    Without `is_limited`, only what namespaces send has a rate, which is enough for two of them.

    Yields:
        The address of this process at the switch, and the namespaces.

    Raises:
        CalledProcessError: the kernel has no such link or queue.
    """
    own = os.getpid()
    switch, address = f"hks{own}"[:15], "10.72.0.254"
    ends = [Namespace(f"hocket-{own}-{n}", f"hk{own}n{n}"[:15], f"10.72.0.{n + 1}") for n in range(len(mbits))]
    try:
        _run("ip", "link", "add", switch, "type", "bridge")
        _run("ip", "addr", "add", f"{address}/24", "dev", switch)
        _run("ip", "link", "set", switch, "up")
        for end, mbit in zip(ends, mbits, strict=True):
            port = f"{end.interface}p"[:15]
            _run("ip", "netns", "add", end.name)
            _run("ip", "link", "add", end.interface, "netns", end.name, "type", "veth", "peer", "name", port)
            _run("ip", "link", "set", port, "master", switch, "up")
            _run(*end.command("ip", "addr", "add", f"{end.address}/24", "dev", end.interface))
            _run(*end.command("ip", "link", "set", end.interface, "up"))
            _run(*end.command("ip", "link", "set", "lo", "up"))
            limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
            _run(*end.command("tc", "qdisc", "add", "dev", end.interface, *limit))
            if is_limited:
                _run("tc", "qdisc", "add", "dev", port, *limit)
        yield address, ends
    finally:
        for end in ends:
            # Not with its namespace, which goes some time later.
            subprocess.run(["ip", "link", "del", f"{end.interface}p"[:15]], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", end.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", switch], capture_output=True, check=False)


def enter(name: str) -> None:
    """Move this process, which has one thread yet, into a namespace.

    Raises:
        OSError: there is no such namespace, or no right to enter it.
    """
    with Path("/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
