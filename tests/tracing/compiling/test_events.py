"""Events of a wrapper become kernels on bases and offsets, without views that only they use, with few allocations."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.tracing.compiling.events import arranged
from hocket.tracing.compiling.wrapper import recorded

HEAD = "".join(
    f"{name} = async_compile.cpp_pybinding([{types}], r'''void kernel()''')\n"
    for name, types in {"one": "'const float*', 'float*'", "two": "'const float*', 'float*', 'float*'"}.items()
)
WHOLE = "empty_strided_cpu((4, 12), (12, 1), torch.float32)"


def half(of: str, offset: int) -> str:
    return f"reinterpret_tensor({of}, (4, 6), (12, 1), {offset})"


def events_of(*lines: str) -> tuple[list[dict[str, Any]], list[int]]:
    body = "\n".join(f"    {line}" for line in ("a, = args", *lines))
    with FakeTensorMode():
        listing = arranged(recorded(f"{HEAD}def call(args):\n{body}\n", [torch.zeros(4, 6)]), "own_")
    return listing["events"], listing["outputs"]


def test_a_kernel_that_writes_parts_allocates_the_whole() -> None:
    (event,), (whole,) = events_of(f"b = {WHOLE}", f"two(a, {half('b', 0)}, {half('b', 6)})", "return (b, )")
    assert event["kernel"] == "own_two"
    assert (event["given"], event["written"], event["outs"]) == ([0], [], [[0, whole]])
    assert (event["order"], event["offsets"]) == ([0, -1, -1], [0, 0, 6])


def test_the_second_kernel_writes_into_what_the_first_one_made() -> None:
    (first, second), (whole,) = events_of(
        f"b = {WHOLE}", f"one(a, {half('b', 0)})", f"one(a, {half('b', 6)})", "return (b, )"
    )
    assert first["outs"] == [[0, whole]]
    assert (second["given"], second["written"], second["outs"]) == ([0, whole], [whole], [])
    assert (second["order"], second["offsets"]) == ([0, 1], [0, 6])


def test_a_view_of_a_view_begins_behind_both() -> None:
    events, _ = events_of(
        f"b = {WHOLE}",
        f"c = {half('b', 6)}",
        "d = reinterpret_tensor(c, (4, 2), (12, 1), 3)",
        "one(a, d)",
        "return (b, )",
    )
    assert [event["offsets"] for event in events] == [[0, 9]]


def test_a_view_that_an_op_reads_or_the_step_leaves_stays() -> None:
    events, (left,) = events_of(
        f"b = {WHOLE}",
        f"c = {half('b', 6)}",
        f"d = {half('b', 0)}",
        "one(a, c)",
        "e = empty_strided_cpu((6, 6), (6, 1), torch.float32)",
        "extern_kernels.mm(reinterpret_tensor(c, (6, 4), (1, 12), 0), a, out=e)",
        "one(e, c)",
        "return (d, )",
    )
    views = [event for event in events if event.get("op") == "hocket.part.default"]
    assert left in [event["outs"][0][1] for event in views]
    assert len(views) == 3, "what the product reads, what that is a view of, and what is left"


def test_a_buffer_that_is_read_first_or_that_an_op_fills_in_parts_is_allocated_by_itself() -> None:
    for lines in (
        (f"b = {WHOLE}", f"one({half('b', 6)}, a)"),
        (f"b = {WHOLE}", f"extern_kernels.mm(a, reinterpret_tensor(a, (6, 6), (1, 0), 0), out={half('b', 0)})"),
    ):
        events, _ = events_of(*lines, "return (b, )")
        assert events[0]["op"] == "aten.empty_strided.default"


def test_a_product_that_fills_a_buffer_makes_it() -> None:
    events, (made,) = events_of(
        "b = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "extern_kernels.mm(a, reinterpret_tensor(a, (6, 4), (1, 6), 0), out=b)",
        "return (b, )",
    )
    assert [event["op"] for event in events] == ["hocket.part.default", "aten.mm.default"]
    assert events[1]["outs"] == [[-1, made]]
