"""The ranks of a job: torchrun has started this process as one of them, or all are started here, on this machine.

This process keeps the store of the ranks that it starts, at an address that only this machine reaches, and makes a
secret for them where the environment has none.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Collection

from hocket.cli.console import UsageError
from hocket.errors import HocketError

# The variables that torchrun sets for each process that it starts.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOST = "127.0.0.1"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_C_LIBRARY = ctypes.CDLL(None)
_POLL_S = 0.05
_TIMEOUT_S = 60.0
# The time for the other ranks to report their end, after one has failed.
_GRACE_S = 2.0


def is_rank(ranks: int, asked: str) -> bool:
    """Return True if torchrun has started this process as one of `ranks`, for which the user has `asked`.

    Raises `UsageError` if its variables make no sense.
    """
    given = {name: os.environ[name] for name in _RANK_VARIABLES if name in os.environ}
    if len(given) < len(_RANK_VARIABLES):
        return False
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not given[name].isdecimal():
            raise UsageError(f"{name}: expected a whole number in the environment, got {given[name]!r}")
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        raise UsageError(f"RANK: expected one below WORLD_SIZE={given['WORLD_SIZE']}, got {given['RANK']}")
    if int(given["WORLD_SIZE"]) != ranks:
        raise UsageError(f"torchrun has started {given['WORLD_SIZE']} ranks; {asked}")
    return True


def start_ranks(args: Namespace, ranks: int, *, with_agents: bool = False, may_fail: Collection[int] = ()) -> None:
    """Start all ranks on this machine, each with this process's command line, and wait for their end.

    Agents know no secret that is made here. Without the ranks that `may_fail` the others go on, and an error ends all.
    """
    from hocket.distributed.store import SECRET_VARIABLE, opened

    if not with_agents:
        os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex())
    store = opened(_HOST, 0, _TIMEOUT_S, is_keeper=True)
    given = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank keeps it
    }
    if ranks > 1:  # as torchrun does: ranks of many threads each would wait for each other
        given["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    # Python searches the folder for modules, which may have the names of others, only where it did so for this process.
    searches = getattr(sys.modules["__main__"], "__spec__", None) is not None
    command = [sys.executable, *([] if searches else ["-P"]), "-m", "hocket", *args.words]
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through what ends the ranks
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=os.environ | given | own, preexec_fn=_end_with_parent))
        failed = _wait(processes, [rank for rank in range(ranks) if rank not in may_fail])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        rank, status = failed
        how = "has failed; what it said stands above" if status > 0 else f"was ended by {signal.Signals(-status).name}"
        raise HocketError(f"{args.target}: rank {rank} {how}")


def _end_with_parent() -> None:
    """Let Linux end this process, a child that executes nothing yet, with the one that has started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for that one, which ends all ranks
    if sys.platform.startswith("linux"):
        _C_LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _wait(processes: list[subprocess.Popen[bytes]], needed: list[int]) -> tuple[int, int] | None:
    """Wait until all ranks have ended, or a needed one has failed and the others have had time to say so.

    Returns the first of the needed ranks that has failed, with its exit status, which is negative for a signal.
    """
    failed: tuple[int, int] | None = None
    until = float("inf")
    while True:
        found = [process.poll() for process in processes]
        if failed is None and (failed := next(((rank, status) for rank in needed if (status := found[rank])), None)):
            until = time.monotonic() + _GRACE_S
        if None not in found or time.monotonic() >= until:
            return failed
        time.sleep(_POLL_S)
