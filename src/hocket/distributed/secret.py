"""The shared secret of a job: both ends of a connection prove that they know it before anything else is sent.

Each end sends a random challenge, and answers that of the peer by an HMAC over both challenges, the name of the
connection and its own place in it (RFC 2104). So neither the secret nor an answer that could be used again is sent.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import Any

import torch

from hocket.errors import InputError, PeerError

# The variable that has the secret: the same text for all ranks and agents, or unset for all of them.
SECRET_VARIABLE = "HOCKET_JOB_SECRET"

CHALLENGE_BYTES = 32
TAG = 0


def job_secret() -> bytes | None:
    """Return the secret of the environment, or None if there is none.

    Raises:
        InputError: it is empty.
    """
    text = os.environ.get(SECRET_VARIABLE)
    if text == "":
        raise InputError(f"distribute: {SECRET_VARIABLE} is empty; set a secret, or unset it")
    return None if text is None else text.encode()


def check_peer(group: Any, place: int, key: str, secret: bytes | None, me: str, peer: str) -> None:
    """Exchange proofs of the secret with the peer. Without a secret at both ends, return.

    Args:
        group: process group of two, over which nothing has been sent.
        place: rank of this end in it.
        key: name of the connection, the same at both ends.
        secret: secret of this end.
        me: name of this process in errors.
        peer: name of the other one.

    Raises:
        PeerError: one end has no secret, or another one.
        RuntimeError: the peer is gone or silent.
    """
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
