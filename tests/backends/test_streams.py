"""The rates of a GPU that no published figures are known of."""

from types import SimpleNamespace
from typing import Any

import pytest

from hocket.backends.streams import _by_properties, _published
from hocket.ir import Machine


def properties(**changes: Any) -> Any:
    """Those of an RTX 4090, as torch states them."""
    known = {"major": 8, "minor": 9, "multi_processor_count": 128, "clock_rate": 2_520_000}
    return SimpleNamespace(**{**known, "memory_clock_rate": 10_501_000, "memory_bus_width": 384, **changes})


def test_rates_of_an_unknown_card_follow_from_its_clocks() -> None:
    card = _by_properties(properties())
    assert card.flops_per_s == pytest.approx(82.6e12, rel=0.01)
    assert card.bytes_per_s == pytest.approx(1008e9, rel=0.01)
    assert card.launch_us == Machine.preset("a100").devices[0].launch_us


def test_an_a100_by_its_clocks_is_the_published_one() -> None:
    clocks = {"clock_rate": 1_410_000, "memory_clock_rate": 1_215_000, "memory_bus_width": 5120}
    card = _by_properties(properties(major=8, minor=0, multi_processor_count=108, **clocks))
    published = Machine.preset("a100").devices[0]
    assert card.flops_per_s == pytest.approx(published.flops_per_s, rel=0.02)
    assert card.bytes_per_s == pytest.approx(published.bytes_per_s, rel=0.02)


def test_a_card_whose_driver_states_no_clocks_still_has_rates() -> None:
    card = _by_properties(SimpleNamespace(major=12, minor=0, multi_processor_count=100))
    assert card.flops_per_s
    assert card.bytes_per_s


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-40GB"]
)
def test_cards_with_published_rates(name: str) -> None:
    card = _published(name)
    assert card is not None
    assert card.bytes_per_s
