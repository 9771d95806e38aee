"""The fused batch norm against torch's in float64, where channels come last, whatever their number."""

import threading

import pytest
import torch

from hocket.native import available, load

pytestmark = pytest.mark.skipif(not available(), reason=available().why)
aten = torch.ops.aten

# The rounding error of sums of a few hundred values of either dtype, relative to the largest one.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def image(dtype: torch.dtype, channels: int, size: int = 9) -> torch.Tensor:
    return (torch.randn(4, channels, size, size) * 2 + 3).to(dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3, 16, 36, 70])
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_forward_and_backward_are_torchs(dtype: torch.dtype, channels: int, neighbours: bool, threads: int) -> None:
    load()
    torch.manual_seed(0)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, added, first, second = (image(dtype, channels, 25) for _ in range(4))
        first, second = first - 3, second - 3
        weight, bias, mean, var = (
            torch.rand(channels) + 0.5,
            torch.randn(channels),
            torch.randn(channels),
            torch.rand(channels),
        )
        wide = [v.double() for v in (weight, bias, mean, var)]
        y, center, invstd = torch.ops.hocket.norm_forward(
            x, weight, bias, mean, var, 0.1, 1e-5, neighbours, added if neighbours else None
        )
        out, *saved = aten.native_batch_norm(x.double(), *wide, True, 0.1, 1e-5)
        close(y, (out + added.double()).relu() if neighbours else out, dtype)
        for mine, its in zip((center, invstd, mean, var), (*saved, *wide[2:]), strict=True):
            close(mine, its, torch.float32)
        gradient = first.double()
        if neighbours:
            gradient = torch.where(y.double() > 0, gradient + second.double(), 0.0)
        expected = aten.native_batch_norm_backward(
            gradient, x.double(), wide[0], None, None, *saved, True, 1e-5, [True, True, True]
        )
        others = (second, y) if neighbours else (None, None)
        *found, kept = torch.ops.hocket.norm_backward(first, *others, x, weight, center, invstd, neighbours)
        for mine, its in zip(found, expected, strict=True):
            close(mine, its, dtype)
        assert kept.numel() == (gradient.numel() if neighbours else 0)
        if neighbours:
            close(kept, gradient, dtype)
        for tensor in (y, found[0]):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
    finally:
        torch.set_num_threads(usual)


def test_what_is_no_number_stays_none() -> None:
    load()
    x = image(torch.float32, 4)
    x[0, 1, 0, 0] = float("nan")
    ones, var = torch.ones(4), torch.ones(4)
    y, *_ = torch.ops.hocket.norm_forward(x, ones, torch.zeros(4), torch.zeros(4), var, 0.1, 1e-5, True, None)
    assert y[:, 1].isnan().all()
    assert not y[:, [0, 2, 3]].isnan().any()
    assert var.isnan().tolist() == [False, True, False, False]


def test_other_layouts_are_taken_and_a_width_repeats_bitwise() -> None:
    load()
    x = image(torch.float32, 12)
    vectors = [torch.rand(12) for _ in range(4)]
    results = [
        torch.ops.hocket.norm_forward(given, *(v.clone() for v in vectors), 0.1, 1e-5, True, None)[0]
        for given in (x, x.contiguous(), x)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_thread_whose_first_parallel_op_it_is() -> None:
    """Torch initialises a thread at its first parallel op, to the process's width: sums for one thread, made by two."""
    load()
    x = image(torch.float32, 32, 40)
    weight, mean, var = torch.rand(32), torch.zeros(32), torch.ones(32)
    _, center, invstd = torch.ops.hocket.norm_forward(x, weight, weight, mean, var, 0.1, 1e-5, False, None)
    usual, is_narrow, is_wide = torch.get_num_threads(), threading.Event(), threading.Event()
    found: list[torch.Tensor] = []
    widths: list[int] = []

    def backward() -> list[torch.Tensor]:
        return torch.ops.hocket.norm_backward(x, None, None, x, weight, center, invstd, False)[:3]

    def run() -> None:
        torch.get_num_threads()  # initialises the thread, for torch
        torch.set_num_threads(1)
        is_narrow.set()
        is_wide.wait()
        found.extend(backward())
        widths.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    is_narrow.wait()
    torch.set_num_threads(2)
    is_wide.set()
    thread.join()
    expected = backward()
    torch.set_num_threads(usual)
    torch.testing.assert_close(found, list(expected))
    assert widths == [1]
