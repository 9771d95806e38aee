"""Small pieces of HTML: everything that comes from a user passes through `text`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from hocket.reporting.svg import COLOURS, DARK, LIGHT
from hocket.reporting.words import plain


class Cell(NamedTuple):
    """A cell of a table, already HTML. `value` is its sort key, if that is not its text."""

    html: str
    kind: str = ""
    value: float | None = None


def text(words: str) -> str:
    """Escape `words` for an element's content or a quoted attribute."""
    return escape(plain(words))


def breakable(words: str) -> str:
    """Escape `words`, and allow line breaks after the marks which join the parts of a name."""
    return re.sub(r"([./:_])(?=[^./:_;])", r"\1<wbr>", text(words))


def number(value: float, words: str) -> Cell:
    """Return a cell with a number: shown as `words`, sorted by `value`."""
    return Cell(text(words), "n", value)


def table(
    head: Sequence[Cell],
    rows: Iterable[Sequence[Cell]],
    *,
    caption: str,
    identity: str = "",
    sortable: bool = False,
    tall: bool = False,
    kinds: Mapping[int, str] | None = None,
) -> str:
    """Return a table in a box that scrolls. The first cell of a row is its heading, `kinds` gives classes of rows."""
    kinds = kinds or {}
    columns = "".join(f'<th scope="col"{_kind(cell.kind)}>{cell.html}</th>' for cell in head)
    lines = []
    for position, row in enumerate(rows):
        first, *rest = row
        cells = "".join(f"<td{_attributes(cell)}>{cell.html}</td>" for cell in rest)
        marked = _kind(kinds.get(position, ""))
        lines.append(f'<tr{marked}><th scope="row"{_attributes(first)}>{first.html}</th>{cells}</tr>')
    found = f' id="{identity}"' if identity else ""
    return (
        f'<div class="scroll{" tall" if tall else ""}" tabindex="0" role="group" aria-label="{text(caption)}">'
        f"<table{found}{_kind('sortable' if sortable else '')}><thead><tr>{columns}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def framed(title: str, main: str, scripts: str = "", css: str = "") -> str:
    """Return the text of a page of ours: light or dark as the reader's system is, and without requests.

    `main` and `scripts`, elements at its end, are HTML already. `css` has rules of this page alone.
    """
    values = {
        "title": text(title),
        "colours": colours(),
        "css": f"{template('page.css')}{css}",
        "main": main,
        "scripts": scripts,
    }
    return fill(template("frame.html"), values)


def script_element(code: str) -> str:
    """Return a script element. The code is ours, and closes none."""
    return f"<script>\n{code}</script>"


def header(title: str, headline: str, why: str, tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return the top of a page: a headline, why, and figures, each with its name, its value and a note."""
    items = "".join(
        f'<div class="tile"><dt>{text(name)}</dt><dd>{text(value)}<small>{text(note)}</small></dd></div>'
        for name, value, note in tiles
    )
    return (
        f'<header><p class="brand"><b>Hocket</b> · {text(title)}</p><h1>{text(headline)}</h1>'
        f'<p class="why">{text(why)}</p><dl class="tiles">{items}</dl></header>'
    )


def section(identity: str, title: str, body: str, lead: str = "") -> str:
    """Return a section of a page. Its body and its lead are HTML already."""
    above = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section aria-labelledby="{identity}"><h2 id="{identity}">{text(title)}</h2>{above}{body}</section>'


def meter(share: float) -> str:
    """Return a bar that is filled to `share`, as decoration beside the number."""
    return f'<span class="meter" aria-hidden="true"><b style="width:{min(1.0, share) * 100:.1f}%"></b></span>'


def swatch(role: str) -> str:
    """Return the colour of a role, beside its name."""
    return (
        f'<span class="swatch" style="background:var(--role-{role})" aria-hidden="true"></span>'
        f"{text(role.replace('_', ' '))}"
    )


def script_json(document: Any) -> str:
    """Return `document` as JSON that is safe inside a script element, whatever its strings hold."""
    found = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def template(name: str) -> str:
    """Return the text of a file in this package's ``assets`` folder."""
    return resources.files("hocket.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def fill(template: str, values: Mapping[str, str]) -> str:
    """Put `values` into the ``{{name}}`` places of `template`, in one pass: a value is never read as a template."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: values[place[1]], template)


def colours() -> str:
    """Return the colours of both backgrounds as CSS custom properties."""
    light = {
        "ground": "#f7f6f2", "paper": LIGHT.paper, "rest": LIGHT.rest, "line": LIGHT.line, "hair": "#efede8",
        "hover": "#f7f6f2", "ink": LIGHT.ink, "soft": LIGHT.soft, "muted": "#b3b0a7", "accent": "#2f6f8f",
    }  # fmt: skip
    dark = {
        "ground": "#101317", "paper": DARK.paper, "rest": DARK.rest, "line": DARK.line, "hair": "#232931",
        "hover": "#1d222a", "ink": DARK.ink, "soft": DARK.soft, "muted": "#5b6470", "accent": "#6db3d1",
    }  # fmt: skip
    for role, colour in COLOURS.items():
        for ground, shade in ((light, colour.light), (dark, colour.dark)):
            ground[f"role-{role}"] = shade
            ground[f"on-{role}"] = _ink_on(shade)
    return (
        f":root {{ color-scheme: light dark; {_properties(light)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_properties(dark)} }} }}"
    )


def _properties(values: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in values.items())


def _ink_on(shade: str) -> str:
    # Whichever of black and white has the higher contrast (WCAG's relative luminance; they meet at 0.179).
    channels = [int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#12161b" if luminance > 0.2 else "#ffffff"


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _attributes(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value:.6g}"'
    return f"{_kind(cell.kind)}{value}"
