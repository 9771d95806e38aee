"""Shared parts of the tests of optimizers."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _double_products(request):
    """NAdam keeps a product in torch's default dtype and loads it in that of the parameters: here the same."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or not str(callspec.params.get("case")).startswith("nadam"):
        yield
        return
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
