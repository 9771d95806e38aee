"""Colours, text, escaping and style that all drawings share, for a light and a dark background.

One colour per role, the same in the drawing, the page and the trace. The hues are those of Paul Tol's colour-blind safe
schemes ("bright", with the orange of "vibrant"), a little lighter on a dark background. No reading depends on colour
alone: tooltips, legends and tables name the role.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from xml.sax.saxutils import escape

from hocket.ir import ROLES
from hocket.reporting.words import plain, shorten

EDGE_PX = 20.0

_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"


class Colour(NamedTuple):
    """Colours of a role on a light and a dark background, and the nearest name that Chrome's trace viewer reserves."""

    light: str
    dark: str
    cname: str


class Ground(NamedTuple):
    """Colours of the background, the text and the lines."""

    paper: str
    rest: str
    line: str
    ink: str
    soft: str
    bound: str


COLOURS: dict[str, Colour] = {
    "forward": Colour("#4477aa", "#6a9bcf", "thread_state_runnable"),
    "activation_grad": Colour("#ee6677", "#ee7f8d", "bad"),
    "weight_grad": Colour("#228833", "#46a758", "good"),
    "bias_grad": Colour("#ccbb44", "#d6c75e", "yellow"),
    "update": Colour("#aa3377", "#cf6aa4", "detailed_memory_dump"),
    "recv": Colour("#66ccee", "#7fd5f0", "light_memory_dump"),
    "send": Colour("#ee7733", "#f2935b", "thread_state_iowait"),
    "other": Colour("#9a9a94", "#85898f", "grey"),
}

LIGHT = Ground(paper="#ffffff", rest="#eceae4", line="#d9d6ce", ink="#1f2630", soft="#616a76", bound="#1f2630")
DARK = Ground(paper="#171b21", rest="#262c34", line="#363e48", ink="#e6e8eb", soft="#9aa4b0", bound="#e6e8eb")
assert tuple(COLOURS) == ROLES


def document(parts: list[str], *, width: int, height: float, description: str) -> str:
    """Return an SVG document of `parts` on a background."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hk" viewBox="0 0 {width} {height:.0f}" '
            f'width="{width}" height="{height:.0f}" role="img" aria-label="{escaped(description)}">',
            _style(),
            f'<rect class="hk-paper" width="{width}" height="{height:.0f}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def with_title(title: str, width: int) -> tuple[list[str], float]:
    """Return a title at the top of a drawing, if there is one, and the height below it."""
    if not title:
        return [], EDGE_PX
    return [text_at(EDGE_PX, EDGE_PX + 12, shorten(title, width // 9), "hk-title")], EDGE_PX + 28


def text_at(x: float, y: float, text: str, kind: str) -> str:
    """Return a text element at a position. `kind` is a class of the style."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escaped(text)}</text>'


def round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times the powers of ten that is at least `least`, for marks of an axis."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def escaped(text: str) -> str:
    """Escape `text` for an XML element or a double-quoted attribute."""
    return escape(plain(text), {'"': "&quot;"})


def _style() -> str:
    rules = [
        f".hk text{{font:11px {_FONT};font-variant-numeric:tabular-nums}}",
        ".hk .hk-title{font-size:15px;font-weight:600}",
        ".hk .hk-head{font-size:12px;font-weight:600}",
        ".hk .hk-lane,.hk .hk-before{text-anchor:end}.hk .hk-tick{text-anchor:middle}.hk .hk-small{font-size:9px}",
        ".hk-grid,.hk-bound{fill:none;stroke-width:1}.hk-bound{stroke-width:1.5;stroke-dasharray:5 4}",
        ".hk-line{fill:none;stroke-width:1.6;stroke-linejoin:round}.hk-band{stroke:none;opacity:.16}",
        _ground(LIGHT, dark=False),
        f"@media(prefers-color-scheme:dark){{{_ground(DARK, dark=True)}}}",
    ]
    return f"<style>{''.join(rules)}</style>"


def _ground(ground: Ground, *, dark: bool) -> str:
    shades = {role: c.dark if dark else c.light for role, c in COLOURS.items()}
    roles = "".join(
        f".hk-{role}{{fill:{shade}}}.hk-line.hk-{role}{{fill:none;stroke:{shade}}}" for role, shade in shades.items()
    )
    return (
        f".hk-paper{{fill:{ground.paper}}}.hk-rest{{fill:{ground.rest}}}.hk-grid{{stroke:{ground.line}}}"
        f".hk-bound{{stroke:{ground.bound}}}.hk text{{fill:{ground.ink}}}"
        f".hk .hk-tick,.hk .hk-lane,.hk .hk-key{{fill:{ground.soft}}}{roles}"
    )
