"""Numbers and names as text, the same in the tables, the drawing and the page."""

from __future__ import annotations

import math

MICRO = "\N{MICRO SIGN}s"

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plain(text: str) -> str:
    r"""Replace what cannot be printed (escape sequences, lone surrogates).

    Names come from the user's model, and a terminal, XML and UTF-8 each refuse some of what a string may hold.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def shorten(text: str, limit: int) -> str:
    """Shorten `text` to `limit` characters by leaving out the middle: both ends of an op's name matter."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}" if tail else f"{text[: limit - 1]}…"


def duration_text(duration_us: float, micro: str = "us") -> str:
    """Format microseconds in a suitable unit, with three digits."""
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(duration_us) >= scale * 0.9995:
            return f"{_three_digits(duration_us / scale)} {unit}"
    return f"{_three_digits(duration_us)} {micro}"


def quantity_text(value: float, unit: str) -> str:
    """Format a count of bytes or operations with a decimal prefix."""
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def percent_text(share: float) -> str:
    """Format a share of 1 as a percentage: whole from ten per cent on."""
    percent = share * 100
    return f"{percent:.0f}%" if percent >= 9.95 or percent == 0 else f"{percent:.1f}%"


def count_text(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 op``, ``1,200 ops``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def value_text(value: object) -> str:
    """Format the value of a hyper-parameter, a float with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _three_digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, digits)}f}".rstrip("0").rstrip(".") if digits > 0 else f"{rounded:,.0f}"
