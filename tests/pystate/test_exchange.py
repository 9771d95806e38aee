"""Functions and modules that stand in the place of a step's own while it is planned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn

from hocket.pystate.exchange import _Through, _to_read


def test_a_module_that_two_threads_call_at_once_has_its_own_forward_again():
    both = Barrier(2, timeout=30)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        both.wait()
        return x + 1

    module = nn.Identity()
    through = _Through(module, MethodType(forward, module))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(through, [torch.zeros(1), torch.ones(1)]))
    assert [each.item() for each in found] == [1, 2]
    assert "forward" not in vars(module)


def test_what_is_read_by_numpy_is_read_of_the_tensor_where_that_gives_the_same():
    assert type(_to_read(torch.ones(3), "tolist")) is torch.Tensor
    assert type(_to_read(torch.ones(()), "item")) is torch.Tensor
    for value in (torch.ones(3), torch.ones((), dtype=torch.int8)):  # an error of numpy's own, a rare type
        assert type(_to_read(value, "item")) is np.ndarray
    with pytest.raises(RuntimeError, match="requires grad"):
        _to_read(torch.ones(3, requires_grad=True), "tolist")
