"""Calls as they are traced for Inductor make what torch's kernels make, in the same layout."""

from __future__ import annotations

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hocket.tracing.compiling.functional import _called

aten = torch.ops.aten


def test_an_empty_cache_and_a_transposed_tensor_are_joined_as_the_kernel_joins_them() -> None:
    """As the first step of a cache of keys does; the view after it needs the kernel's strides."""

    def run(x: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
        joined = _called(aten.cat.default, [[empty, x.transpose(1, 2)], -2], {})
        return joined.view(4, 6, 4)

    usual = aten.cat.default([torch.empty(0), torch.ones(2, 6, 2, 4).transpose(1, 2)], -2)
    assert usual.is_contiguous()
    with FakeTensorMode():
        given = torch.empty(2, 6, 2, 4), torch.empty(0)
        make_fx(torch.func.functionalize(run), decomposition_table=select_decomp_table())(*given)
    x = torch.randn(2, 6, 2, 4)
    assert torch.equal(run(x, torch.empty(0)), x.transpose(1, 2).reshape(4, 6, 4))
