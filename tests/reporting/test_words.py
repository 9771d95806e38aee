import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.reporting.words import duration_text, percent_text, plain, quantity_text, shorten


@pytest.mark.parametrize(
    ("duration_us", "expected"),
    [(0, "0 us"), (0.001234, "0.00123 us"), (999.4, "999 us"), (999.6, "1 ms"), (1e6, "1 s"), (3.6e9, "3,600 s")],
)
def test_durations(duration_us: float, expected: str) -> None:
    assert duration_text(duration_us) == expected


def test_quantities_and_shares() -> None:
    assert quantity_text(802816, "B") == "803 kB"
    assert quantity_text(12, "B") == "12 B"
    assert [percent_text(share) for share in (0.0, 0.0123, 0.1, 1.0)] == ["0%", "1.2%", "10%", "100%"]


@given(st.text(), st.integers(1, 30))
def test_shorten_keeps_to_the_limit(text: str, limit: int) -> None:
    found = shorten(text, limit)
    assert len(found) <= limit
    assert found == text or "…" in found


@given(st.text(st.characters(exclude_categories=())))
def test_plain_text_can_be_written(text: str) -> None:
    found = plain(text)
    assert len(found) == len(text)
    assert "\x1b" not in found
    found.encode("utf-8")
