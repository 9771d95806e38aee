"""A convolution some images at a time is the convolution: results, gradients and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.tracing import float64
from hocket.tracing.float64 import convolution_in_parts

aten = torch.ops.aten
OPTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = {
    # images, weight, and: stride, padding, dilation, whether transposed, output padding, groups
    "plain": ((7, 4, 9, 8), (6, 4, 3, 3), [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]),
    "strided groups": ((7, 4, 9, 8), (6, 2, 3, 3), [[2, 2], [1, 1], [1, 1], False, [0, 0], 2]),
    "dilated": ((7, 4, 9, 8), (6, 4, 3, 3), [[1, 1], [0, 0], [2, 2], False, [0, 0], 1]),
    "transposed": ((7, 4, 9, 8), (4, 6, 3, 3), [[2, 2], [1, 1], [1, 1], True, [1, 1], 1]),
    "one dimension": ((7, 4, 9), (6, 4, 3), [[1], [1], [1], False, [0], 1]),
    "one image": ((1, 4, 9, 8), (6, 4, 3, 3), [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_make_the_whole(name: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, weight_shape, options = OPTIONS[name]
    if last and len(shape) != 4:
        pytest.skip("channels last is for images")
    torch.manual_seed(0)
    kind = torch.channels_last if last else torch.contiguous_format
    x, weight = torch.randn(shape).double().contiguous(memory_format=kind), torch.randn(weight_shape).double()
    bias = torch.randn(6).double()
    forward, backward = map(convolution_in_parts, (aten.convolution.default, aten.convolution_backward.default))
    assert forward is not None
    assert backward is not None
    whole = aten.convolution.default(x, weight, bias, *options)
    gradient = torch.randn_like(whole)
    wanted = [
        aten.convolution_backward.default(gradient, x, weight, [6], *options, m)
        for m in ([True] * 3, [False, True, False])
    ]
    # Two images at a time, and one is left over.
    monkeypatch.setattr(float64, "MAX_COLUMNS_BYTES", 2 * 8 * weight[0, 0].numel() * x[0].numel())
    sizes: list[int] = []
    part = float64._parts
    monkeypatch.setattr(float64, "_parts", lambda *a: (found := part(*a), sizes.append(len(found)))[0])
    made = forward(x, weight, bias, *options)
    assert sizes == [1 if len(x) == 1 else 4]
    assert made.stride() == whole.stride()
    torch.testing.assert_close(made, whole, rtol=1e-13, atol=1e-13)
    for mask, expected in zip(([True] * 3, [False, True, False]), wanted, strict=True):
        for one, other in zip(backward(gradient, x, weight, [6], *options, mask), expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.stride() == other.stride()
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_other_dtypes_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "MAX_COLUMNS_BYTES", 1)
    assert float64._parts(torch.randn(5, 2, 4, 4), torch.randn(3, 2, 3, 3)) == [(0, 5)]
    assert len(float64._parts(torch.randn(5, 2, 4, 4).double(), torch.randn(3, 2, 3, 3).double())) == 5
