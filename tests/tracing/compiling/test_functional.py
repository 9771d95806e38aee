"""Calls as they are traced for Inductor make what torch's kernels make, in the same layout."""

from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hocket.tracing.compiling.functional import _called, plain_op
from hocket.tracing.compiling.inductor import _configured, _written
from hocket.tracing.compiling.wrapper import recorded

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


def test_numbers_drawn_in_place_are_drawn_into_a_tensor_of_their_own_and_are_the_same() -> None:
    def run() -> torch.Tensor:
        drawn = _called(aten.empty_strided.default, [[4, 3], [1, 4]], {"dtype": torch.float32})
        _called(aten.bernoulli_.float, [drawn], {})  # 0.5, by default
        return drawn * 2

    with FakeTensorMode():
        module = make_fx(torch.func.functionalize(run), decomposition_table=select_decomp_table())()
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = plain_op(node.target)
    module.recompile()
    assert not any(str(node.target).startswith("aten.bernoulli_.") for node in module.graph.nodes)
    torch.manual_seed(5)
    expected = torch.empty_strided((4, 3), (1, 4)).bernoulli_() * 2
    torch.manual_seed(5)
    assert torch.equal(module(), expected)


def test_a_dropout_behind_a_softmax_is_computed_after_its_numbers_are_drawn() -> None:
    """Inductor 2.13 puts ``bernoulli_`` behind the kernel that needs the numbers."""
    softmax, drawn = {"value": 1}, {"value": 2}
    size, stride = [2, 2, 6, 6], [72, 36, 6, 1]

    def call(op: str, args: list[Any], **outs: int) -> dict[str, Any]:
        return {"op": op, "args": args, "kwargs": {}, "outs": [[-1, slot] for slot in outs.values()]}

    document = {
        "inputs": [[0, size, stride, "float32"]],
        "numbers": 0,
        "calls": [
            call("aten._softmax.default", [{"value": 0}, -1, False], makes=1),
            call("aten.empty_strided.default", [size, stride], makes=2),
            call("aten.bernoulli_.float", [drawn, 0.8]),
            call("aten.mul.Tensor", [softmax, drawn], makes=3),
        ],
        "outputs": [[1, size, stride, "float32"], [3, size, stride, "float32"]],
        "dtypes": {"1": "float32", "2": "float32", "3": "float32"},
    }
    with _configured(1, False):
        source, given = _written(document, False)
    with FakeTensorMode():
        own = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in given]
        notes = recorded(source, own)
    drawing = [n for n, event in enumerate(notes.events) if "bernoulli" in event.get("op", "")]
    product = [n for n, event in enumerate(notes.events) if notes.outputs[1] in event["written"]]
    assert len(drawing) == 1
    assert drawing < product
