"""The host waits where a step of these tests branches on a tensor of a device."""

import pytest
import torch

from hocket.tracing.recording import outcomes
from support.strict_cuda import HOST


@pytest.fixture(autouse=True)
def _branches_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "_on_host", lambda tensor: torch.Tensor.to(tensor, HOST, copy=True))
