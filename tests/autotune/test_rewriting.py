"""Rewritten forms of a step: layouts of images only where there are convolutions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hocket.autotune.rewriting import rewritten_forms
from hocket.tracing.capturing import capture_step


@pytest.mark.parametrize(
    ("compute", "has_layouts"),
    [
        (lambda x, y: F.scaled_dot_product_attention(x, x, x).square().sum(), False),
        (lambda x, y: (x * 2).permute(0, 2, 1, 3).softmax(-1), False),
        (lambda x, y: F.conv2d(x, y).relu(), True),
    ],
    ids=["attention", "permuted", "convolution"],
)
def test_graphs_without_convolutions_keep_their_layout(compute: Callable[[Any, Any], Any], has_layouts: bool) -> None:
    """As the graph of a compiled model: its tensors of four dimensions are its batch."""
    batch = [torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)]

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        return compute(*batch)

    captured = capture_step(step, [], [], batch, split=False)
    forms = rewritten_forms(("", captured), None)
    assert any("channels-last" in form for form in forms) == has_layouts
