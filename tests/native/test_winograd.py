"""Convolutions by Winograd's algorithm against torch's in float64: other sizes, paddings, layouts and widths."""

from collections.abc import Iterator

import pytest
import torch

from hocket.native import available, load

pytestmark = pytest.mark.skipif(not available(), reason=available().why)
aten = torch.ops.aten

# Relative to the largest value: some ulp of sums of a few hundred products.
TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def _loaded() -> None:
    load()
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(usual)


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE * scale)


def check(x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int]) -> None:
    """All three ops, and both as a transposed convolution, against torch's."""
    taps, (made, channels) = weight.shape[-1], weight.shape[:2]
    bias, other = torch.randn(made), torch.randn(channels)
    wide = [v.double() for v in (x, weight, bias, other)]
    usual = ((taps - 2,) * 2, padding, (1, 1))
    expected = aten.convolution(*wide[:3], *usual, False, (0, 0), 1)
    y = torch.ops.hocket.winograd_convolution(x, weight, bias, padding)
    close(y, expected)
    close(torch.ops.hocket.winograd_convolution(x, weight, None, padding), expected - wide[2][:, None, None])
    gradient = torch.randn_like(y)
    options = (*usual, False, (0, 0), 1, (True, True, False))
    dx, dw, _ = aten.convolution_backward(gradient.double(), *wide[:2], None, *options)
    found = torch.ops.hocket.winograd_input_gradient(gradient, weight, None, padding)
    close(found, dx[..., : found.shape[2], : found.shape[3]])
    transposed = aten.convolution(gradient.double(), wide[1], wide[3], *usual, True, (0, 0), 1)
    close(torch.ops.hocket.winograd_input_gradient(gradient, weight, other, padding), transposed)
    for is_last in (False, True):
        of_weight = torch.ops.hocket.winograd_weight_gradient(gradient, x, padding, taps, is_last)
        close(of_weight, dw)
        layout = torch.channels_last if is_last else torch.contiguous_format
        assert of_weight.is_contiguous(memory_format=layout)
    for each in (y, found):
        assert each.is_contiguous(memory_format=torch.channels_last)


CHANNELS = {
    3: [(8, 8), (9, 31), (16, 16), (20, 12), (33, 48), (15, 100), (130, 70)],
    4: [(16, 16), (16, 48), (64, 32), (96, 80), (128, 144)],  # with stride 2
}
IMAGES = {3: ((3, 3), (4, 9), (10, 7)), 4: ((4, 4), (5, 8), (10, 7), (16, 14))}


@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 2), (0, 2), (1, 0)])
@pytest.mark.parametrize(("size", "channels", "made"), [(n, *each) for n, pairs in CHANNELS.items() for each in pairs])
@pytest.mark.usefixtures("_threads")
def test_convolutions_are_torchs(size: int, channels: int, made: int, padding: tuple[int, int]) -> None:
    weight = torch.randn(made, channels, size, size) / channels**0.5
    for height, width in IMAGES[size]:
        check(image(2, channels, height, width), weight, padding)


@pytest.mark.parametrize("taps", [3, 4])
def test_filters_of_any_layout_and_images_of_other_ones(taps: int) -> None:
    weight = torch.randn(32, 16, taps, taps)
    x = image(3, 16, 8, 8)
    plain = torch.ops.hocket.winograd_convolution(x, weight, None, (1, 1))
    for other in (
        weight.contiguous(memory_format=torch.channels_last),
        weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ):
        check(x, other, (1, 1))
        assert torch.equal(torch.ops.hocket.winograd_convolution(x.contiguous(), other, None, (1, 1)), plain)


@pytest.mark.parametrize(("channels", "made"), [(300, 280), (200, 48), (40, 170)])
def test_filters_of_many_channels_whose_parts_threads_share(channels: int, made: int) -> None:
    check(image(1, channels, 6, 6), torch.randn(made, channels, 3, 3) / 50, (1, 1))


def test_a_long_sum_rounds_no_more_than_torchs() -> None:
    x, gradient = image(16, 16, 64, 64), image(16, 16, 64, 64)
    options = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1, (False, True, False))
    weight = torch.randn(16, 16, 3, 3)
    exact = aten.convolution_backward(gradient.double(), x.double(), weight.double(), None, *options)[1]
    usual = aten.convolution_backward(gradient, x, weight, None, *options)[1]
    found = torch.ops.hocket.winograd_weight_gradient(gradient, x, (1, 1), 3, False)
    assert (found - exact).abs().max() <= 2 * (usual - exact).abs().max()


def test_what_is_no_number_reaches_its_neighbours_only() -> None:
    x = image(1, 16, 12, 12)
    x[0, 3, 5, 5] = float("nan")
    y = torch.ops.hocket.winograd_convolution(x, torch.randn(16, 16, 3, 3), None, (1, 1))
    assert y[..., 4:7, 4:7].isnan().all()
    assert not y[..., :4, :].isnan().any(), "a tile that does not read the pixel"
    assert not y[..., 8:, :].isnan().any()


def test_an_empty_batch() -> None:
    weight = torch.randn(16, 8, 3, 3)
    empty = torch.ops.hocket.winograd_convolution(torch.empty(0, 8, 5, 5), weight, None, (1, 1))
    assert empty.shape == (0, 16, 5, 5)
    assert not torch.ops.hocket.winograd_weight_gradient(empty, torch.empty(0, 8, 5, 5), (1, 1), 3, False).any()


@pytest.mark.parametrize(
    ("x", "weight", "padding", "why"),
    [
        (torch.zeros(1, 4, 5, 5), torch.zeros(8, 4, 3, 3), (1, 1), "at least 8 channels"),
        (torch.zeros(1, 8, 5, 5).double(), torch.zeros(8, 8, 3, 3), (1, 1), "float32"),
        (torch.zeros(1, 8, 5, 5), torch.zeros(8, 8, 3, 3), (3, 1), "padding"),
        (torch.zeros(1, 8, 2, 5), torch.zeros(8, 8, 3, 3), (0, 0), "no image"),
        (torch.zeros(1, 16, 5, 5), torch.zeros(8, 8, 3, 3), (0, 0), "no image"),
        (torch.zeros(1, 8, 5, 5), torch.zeros(8, 8, 5, 5), (2, 2), "3 x 3"),
        (torch.zeros(1, 16, 5, 5), torch.zeros(16, 16, 4, 3), (1, 1), "4 x 4"),
        (torch.zeros(1, 24, 5, 5), torch.zeros(16, 24, 4, 4), (1, 1), "multiples of 16 channels"),
        (torch.zeros(1, 16, 5, 1), torch.zeros(16, 16, 4, 4), (2, 2), "no second half"),
        (torch.zeros(1, 16, 3, 5), torch.zeros(16, 16, 4, 4), (0, 0), "no image"),
    ],
)
def test_what_it_cannot_convolve_is_refused(
    x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int], why: str
) -> None:
    with pytest.raises(RuntimeError, match=why):
        torch.ops.hocket.winograd_convolution(x, weight, None, padding)


@pytest.mark.parametrize("bias", [torch.zeros(7), torch.zeros(8).double()])
def test_a_bias_that_does_not_fit_is_refused(bias: torch.Tensor) -> None:
    for op in (torch.ops.hocket.winograd_convolution, torch.ops.hocket.winograd_input_gradient):
        with pytest.raises(RuntimeError, match="for each of 8 channels"):
            op(torch.zeros(1, 8, 5, 5), torch.zeros(8, 8, 3, 3), bias, (1, 1))
