"""A wrapper may do what is listed, and anything else is refused, never left out."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.errors import CaptureError
from hocket.tracing.compiling.wrapper import RecordedCalls, recorded
from support.refusals import fails

KERNEL = "cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''void kernel()''')\n"


def notes_of(body: str, head: str = KERNEL) -> RecordedCalls:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    with FakeTensorMode():
        return recorded(f"{head}def call(args):\n    a, = args\n    args.clear()\n{lines}\n", [torch.zeros(4, 6)])


def test_allocations_views_kernels_and_ops_are_events() -> None:
    notes = notes_of(
        "b = empty_strided_cpu((6, 6), (6, 1), torch.float32)\n"
        "extern_kernels.mm(reinterpret_tensor(a, (6, 4), (1, 6), 0), a, out=b)\n"
        "c = empty_strided_cpu((6, 6), (6, 1), torch.float32)\n"
        "cpp_fused_0(b, c)\ndel b\n"
        "torch.ops.aten.bernoulli_.float(c, 0.5)\n"
        "return (c, )"
    )
    assert [event.get("kernel", event.get("op")) for event in notes.events] == [
        *("aten.empty_strided.default", "hocket.part.default", "aten.mm.out"),
        *("aten.empty_strided.default", "cpp_fused_0", "aten.bernoulli_.float"),
    ]
    product, kernel, draw = notes.events[2], notes.events[4], notes.events[5]
    (out,) = notes.outputs
    assert product["written"] == [1]
    assert (kernel["given"], kernel["written"]) == ([1, out], [out])
    assert (draw["written"], draw["outs"]) == ([out], [])
    assert notes.root(2) == 0, "the view is of the input's memory"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return (unheard_of(a), )", "name 'unheard_of' is not defined"),
        ("extern_kernels.dgemm(a, a, out=a)\nreturn (a, )", "extern_kernels.dgemm"),
        ("return (torch.relu(a), )", "torch.relu"),
        ("torch.ops.prims.sin.default(a)\nreturn (a, )", "prims.sin"),
        ("cpp_fused_0(a, 7)\nreturn (a, )", "kernel cpp_fused_0 is given what is no tensor"),
        ("cpp_fused_0(a)\nreturn (a, )", "kernel cpp_fused_0 is given what is no tensor"),
        ("return (a[0], )", "does what is not known"),
        ("return (7, )", "returns a int"),
        ("open('x')\nreturn (a, )", "name 'open' is not defined"),
    ],
)
def test_what_is_not_known_is_refused(body: str, problem: str) -> None:
    fails(CaptureError, problem, notes_of, body)


@pytest.mark.parametrize("bias", ["bias=b", "b"])
def test_a_convolution_may_be_given_its_bias_by_position(bias: str) -> None:
    options = "stride=(1,), padding=(0,), dilation=(1,), transposed=False, output_padding=(0,), groups=1"
    options = f"{bias}, {options}"
    notes = notes_of(
        "x = empty_strided_cpu((1, 2, 5), (10, 5, 1), torch.float32)\n"
        "w = empty_strided_cpu((3, 2, 1), (2, 1, 1), torch.float32)\n"
        "b = empty_strided_cpu((3, ), (1, ), torch.float32)\n"
        f"c = extern_kernels.convolution(x, w, {options})\nreturn (c, )"
    )
    assert notes.events[-1]["op"] == "aten.convolution.default"
    assert notes.events[-1]["given"] == [1, 2, 3]


def test_there_is_one_call() -> None:
    fails(CaptureError, "2 functions named call", notes_of, "return (a, )", head="def call(args):\n    pass\n")
