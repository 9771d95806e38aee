"""What all drawings share: text, escaping, and a style for a light and a dark ground."""

from __future__ import annotations

from xml.sax.saxutils import escape

from hocket.reporting.palette import COLOURS, DARK, LIGHT, Ground
from hocket.reporting.words import plain

__all__ = ["EDGE_PX", "document", "escaped", "text_at"]

EDGE_PX = 20.0

_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"


def document(parts: list[str], *, width: int, height: float, description: str) -> str:
    """`parts` on paper, as an SVG document."""
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


def text_at(x: float, y: float, text: str, kind: str) -> str:
    """Words at a place; `kind` is a class of the style."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escaped(text)}</text>'


def escaped(text: str) -> str:
    """`text` as XML may hold it, in an element or between double quotes."""
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
