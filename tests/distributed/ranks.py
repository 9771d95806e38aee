"""Ranks of a job as real processes, that the test starts, stops and kills."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import forked
from benchmarks.namespaces import Namespace, enter


class Ranks:
    """`world` processes that each run ``function(rank, say, *arguments)`` with one thread; the test has their store.

    The store listens at `host`, and ranks that have `ends` run in these network namespaces. ``say(word)`` tells the
    test something; `heard` waits for it. Leaving the context ends all that are left.
    """

    def __init__(
        self, function, world: int, *arguments: Any, host: str = "127.0.0.1", ends: Sequence[Namespace] = ()
    ) -> None:
        self.store = TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=30))
        self._context = forked.context()
        self.replaced: list[Any] = []
        self.pipes, self.processes = [], []
        self.words: list[list[Any]] = [[] for _ in range(world)]
        self.ends: list[Any] = [None] * world
        self._world, self._address, self._interfaces = world, (host, self.store.port), ends
        for rank in range(world):
            pipe, process = self._started(rank, function, arguments)
            self.pipes.append(pipe)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.processes, *self.replaced):
            if process.is_alive():
                process.kill()
            process.join(20)
            assert not process.is_alive()

    def start_again(self, rank: int, function, *arguments: Any) -> Any:
        """Another process in the place of a rank; returns the pipe of the one before."""
        before, self.pipes[rank] = self.pipes[rank], None
        self.replaced.append(self.processes[rank])
        self.pipes[rank], self.processes[rank] = self._started(rank, function, arguments)
        self.ends[rank] = None
        return before

    def beside(self, rank: int, function, *arguments: Any) -> tuple[str, Any]:
        """End of another process of a rank, while the first one goes on."""
        pipe, process = self._started(rank, function, arguments)
        self.replaced.append(process)
        return ended(pipe)

    def heard(self, rank: int, word: Any, timeout_s: float = 60.0) -> None:
        """Wait until a rank has said `word`."""
        deadline = time.monotonic() + timeout_s
        while word not in self.words[rank]:
            assert self.ends[rank] is None, self.ends[rank]
            assert time.monotonic() < deadline, (rank, word, self.words)
            self._listen(rank, 0.1)

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self, rank: int, timeout_s: float = 60.0) -> tuple[str, Any]:
        """End of a rank: ``("returned", value)``, ``("raised", text)`` or ``("died", exit code)``."""
        deadline = time.monotonic() + timeout_s
        while self.ends[rank] is None:
            assert time.monotonic() < deadline, (rank, self.words)
            self._listen(rank, 0.1)
        return self.ends[rank]

    def raised(self, rank: int, timeout_s: float = 60.0) -> str:
        """The error that a rank ended with."""
        kind, text = self.end(rank, timeout_s)
        assert kind == "raised", (kind, text)
        return text

    def check_lost(self, victim: int, names: Sequence[str] = (), timeout_s: float = 30.0) -> None:
        """All others ended with an error that says who lost whom."""
        names = names or [f"rank {rank}" for rank in range(self._world)]
        for rank in set(range(self._world)) - {victim}:
            text = self.raised(rank, timeout_s)
            assert text.startswith(f"PeerError: {names[rank]}"), text
            assert f"lost {names[victim]}" in text, text

    def returned(self, timeout_s: float = 60.0) -> list[Any]:
        """The results of all ranks."""
        ends = [self.end(rank, timeout_s) for rank in range(len(self.processes))]
        assert all(kind == "returned" for kind, _ in ends), ends
        return [value for _, value in ends]

    def _started(self, rank: int, function, arguments) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        settings = (rank, self._world, self._address, self._interfaces[rank] if self._interfaces else None)
        process = self._context.Process(target=_run, args=(theirs, settings, function, arguments), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _listen(self, rank: int, timeout_s: float) -> None:
        if self.pipes[rank].poll(timeout_s):
            try:
                kind, value = self.pipes[rank].recv()
            except (EOFError, ConnectionError):
                self.processes[rank].join(20)
                self.ends[rank] = ("died", self.processes[rank].exitcode)
                return
            if kind == "said":
                self.words[rank].append(value)
            else:
                self.ends[rank] = (kind, value)


def returned(function, world: int, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Return values of all ranks of a job that nothing happens to."""
    with Ranks(function, world, *arguments) as ranks:
        return ranks.returned(timeout_s)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def listening(process: int | str | None = "self") -> set[str]:
    """The addresses and ports at which a process listens, or any process does, as the kernel writes them."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    sockets = {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
    if process is None:
        return set(sockets.values())
    found = set()
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                found.add(sockets.get(os.readlink(f"/proc/{process}/fd/{name}"), ""))
    return found - {""}


def ended(pipe: Any, timeout_s: float = 60.0) -> tuple[str, Any]:
    """End of the process at the other end of a pipe; messages before it are passed over."""
    while True:
        assert pipe.poll(timeout_s)
        kind, value = pipe.recv()
        if kind != "said":
            return kind, value


def _run(pipe, settings, function, arguments) -> None:
    rank, world, (host, port), end = settings
    if end is not None:
        enter(end.name)
        os.environ["GLOO_SOCKET_IFNAME"] = end.interface
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    torch.set_num_threads(1)
    try:
        value = function(rank, lambda word: pipe.send(("said", word)), *arguments)
    except BaseException as error:  # noqa: BLE001 (told to the test)
        pipe.send(("raised", f"{type(error).__name__}: {error}"))
        traceback.print_exc()
    else:
        pipe.send(("returned", value))
