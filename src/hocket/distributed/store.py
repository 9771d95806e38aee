"""The store of a job: what ranks and agents read of each other, signed with the job's secret.

Torch's `TCPStore` serves whatever process reaches it. So each value is stored with an HMAC of its key and itself, and
no value is parsed before that is verified, addresses of connections included. A stranger can still delete keys, and
make a job fail, but not have it read anything.

Rank 0 keeps the store, unless torchrun does, and listens at MASTER_ADDR alone. Connections between ranks listen at the
address of this machine from which it reaches the store, or at the interfaces of GLOO_SOCKET_IFNAME.

Both ends of a connection prove that they know the secret before anything else is sent. Each end sends a random
challenge, and answers that of the peer by an HMAC over both challenges, the name of the connection and its own place in
it (RFC 2104). So neither the secret nor an answer that could be used again is sent.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from hocket.errors import InputError, PeerError

# The variable that has the secret: the same text for all ranks and agents, or unset for all of them.
SECRET_VARIABLE = "HOCKET_JOB_SECRET"

CHALLENGE_BYTES = 32
TAG = 0
# Between two tries to reach a store, which may come later than those who look for it.
_LEAST_S = 0.05


def job_secret() -> bytes | None:
    """Return the secret of the environment, or None if there is none. An empty one is an `InputError`."""
    text = os.environ.get(SECRET_VARIABLE)
    if text == "":
        raise InputError(f"distribute: {SECRET_VARIABLE} is empty; set a secret, or unset it")
    return None if text is None else text.encode()


def check_peer(group: Any, place: int, key: str, secret: bytes | None, me: str, peer: str) -> None:
    """Exchange proofs of the secret with the peer, before anything else. Without a secret at both ends, return."""
    mine = bytes([secret is not None]) + secrets.token_bytes(CHALLENGE_BYTES)
    theirs = _exchanged(group, place, mine)
    if theirs[0] != mine[0]:
        without, other = (me, peer) if secret is None else (peer, me)
        raise PeerError(f"{me} refuses {peer}: {without} has no {SECRET_VARIABLE}, and {other} has one")
    if secret is None:
        return
    challenges = (mine, theirs) if place == 0 else (theirs, mine)
    answers = [hmac.digest(secret, b"".join((bytes([end]), *challenges, key.encode())), "sha256") for end in range(2)]
    if not hmac.compare_digest(_exchanged(group, place, answers[place]), answers[1 - place]):
        raise PeerError(f"{me} refuses {peer}: it has another {SECRET_VARIABLE}")


def _exchanged(group: Any, place: int, message: bytes) -> bytes:
    """Send a message, and return that of the peer, which has the same length."""
    received = torch.zeros(len(message), dtype=torch.uint8)
    sent = torch.tensor(list(message), dtype=torch.uint8)
    works = [group.recv([received], 1 - place, TAG), group.send([sent], 1 - place, TAG)]
    for work in works:
        work.wait()
    return bytes(received.tolist())


POLL_S = 0.02
_SIGNED = b"hocket signed\0"
_DIGEST_BYTES = 32
_INTERFACES = "GLOO_SOCKET_IFNAME"


class JobStore(Store):
    """A store whose values are signed, if there is a secret. Connections of this machine listen at its address."""

    def __init__(self, store: Store, address: str, secret: bytes | None, prefix: str = "") -> None:
        super().__init__()
        self._store, self._address, self.secret, self._prefix = store, address, secret, prefix

    def within(self, prefix: str) -> JobStore:
        """The same store for keys of their own."""
        return JobStore(PrefixStore(prefix, self._store), self._address, self.secret, prefix)

    @property
    def port(self) -> int:
        """The port at which torch's store listens."""
        assert isinstance(self._store, TCPStore)
        return self._store.port

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, self._signed(key, value))  # type: ignore[arg-type]  # bytes, too

    def get(self, key: str) -> bytes:
        """Return a value. Raises `PeerError` if it is not signed with the secret of this process."""
        return self._verified(key, self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._store.compare_set(key, expected, self._signed(key, desired)))  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def options(self, timeout_s: float) -> Any:
        """Options of a process group of two that listens where this store says."""
        found = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        found._timeout = timedelta(seconds=timeout_s)
        interfaces = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
        found._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
            ProcessGroupGloo.create_device(hostname=self._address)
        ]
        return found

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return content if self.secret is None else _SIGNED + self._digest(key, content) + content

    def _digest(self, key: str, content: bytes) -> bytes:
        assert self.secret is not None
        return hmac.digest(self.secret, f"{self._prefix}{key}".encode() + b"\0" + content, "sha256")

    def _verified(self, key: str, value: bytes) -> bytes:
        if self.secret is None:
            if value.startswith(_SIGNED):
                raise PeerError(f"the job has a {SECRET_VARIABLE}, and this process has none")
            return value
        begin = len(_SIGNED) + _DIGEST_BYTES
        digest, content = value[len(_SIGNED) : begin], value[begin:]
        if not value.startswith(_SIGNED) or not hmac.compare_digest(digest, self._digest(key, content)):
            what = "is signed with another" if value.startswith(_SIGNED) else "is not signed with the"
            raise PeerError(f"{key!r} in the store of the job {what} {SECRET_VARIABLE}")
        return content


def store_of_job(rank: int, timeout_s: float) -> JobStore:
    """Connect to the job's store, which rank 0 keeps unless torchrun does, or raise a `PeerError`."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    is_keeper = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found: list[Any] = []

    def connect() -> None:
        try:
            found.append(opened(host, int(port), timeout_s, is_keeper=is_keeper))
        except (RuntimeError, ValueError, OSError) as error:
            found.append(error)

    # Torch waits for minutes, whatever the timeout, for a program on this port that does not speak its protocol.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s + 1.0)
    if found and not isinstance(found[0], Exception):
        return found[0]
    does = "cannot keep" if is_keeper else "does not reach"
    why = first_line(found[0]) if found else f"no answer in {timeout_s:g} s; another program may use this port"
    raise PeerError(f"rank {rank} {does} the store of the job at {host}:{port}: {why}")


def opened(host: str, port: int, timeout_s: float, *, is_keeper: bool = False) -> JobStore:
    """Connect to the store at an address, or keep it there, at that address alone."""
    secret, timeout = job_secret(), timedelta(seconds=timeout_s)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = None
    if is_keeper:
        with suppress(OSError):  # a store that this process keeps for another job there is shared, else torch raises
            listening = socket.create_server(address[:2], family=family).detach()
    else:
        timeout = timedelta(seconds=_wait_for(address, timeout_s))
    store = TCPStore(host, port, None, is_keeper, timeout, False, multi_tenant=True, master_listen_fd=listening)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing, but chooses the address to send from
        return JobStore(store, probe.getsockname()[0], secret)


def _wait_for(address: Any, timeout_s: float) -> float:
    """Wait until a program listens at an address, and return how much of the timeout is left.

    Torch's store waits as well, and writes pages of its C++ frames to stderr if none comes.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(address[:2], max(until - time.monotonic(), _LEAST_S)).close()
            return max(until - time.monotonic(), _LEAST_S)
        except OSError:
            if time.monotonic() + _LEAST_S >= until:
                raise
            time.sleep(_LEAST_S)


def first_line(error: Exception) -> str:
    """Return the first line of an error, or the name of its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def waited(store: Any, key: str, message: str, timeout_s: float) -> str:
    """Wait for a key of a store, and return its text, or raise a `PeerError` that begins with `message`."""
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise PeerError(f"{message}, after {timeout_s:g} s")
        time.sleep(POLL_S)
    return str(store.get(key).decode())


def meet_at(store: Any, key: str, place: int, peer: str, timeout_s: float) -> None:
    """Wait until both ends of the wire of this key have called this. Raises as `waited`."""
    store.set(f"{key}/at {place}", "")
    waited(store, f"{key}/at {1 - place}", f"{peer} does not answer", timeout_s)
