"""Results of rank 0 of a job, sent to all others as JSON text: nothing that a peer sends is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hocket.errors import PeerError


def made_by_first_rank(make: Callable[[], Any]) -> Any:
    """The result of `make` on rank 0, on every rank of the job, or here where there is no job.

    Args:
        make: returns something that JSON can hold. Only rank 0 calls it.

    Raises:
        PeerError: it raised on rank 0, where the error itself is raised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return make()
    if dist.get_rank() != 0:
        document = json.loads(_broadcast(b""))
        if "error" in document:
            raise PeerError(f"rank 0 failed: {document['error']}")
        return document["value"]
    try:
        value = make()
    except Exception as error:
        _broadcast(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        raise
    _broadcast(json.dumps({"value": value}).encode())
    return value


def _broadcast(text: bytes) -> bytes:
    """Rank 0's bytes: their number first, then they themselves."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    return bytes(data.cpu().tolist())
