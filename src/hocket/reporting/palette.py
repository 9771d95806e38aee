"""One colour per role, the same in the drawing, the page and the trace.

The hues are those of Paul Tol's colour-blind safe schemes ("bright", with the orange of "vibrant"), a little lighter
on a dark ground. No reading depends on colour alone: tooltips, legends and tables name the role.
"""

from __future__ import annotations

from typing import NamedTuple

from hocket.ir import ROLES

__all__ = ["COLOURS", "DARK", "LIGHT", "Colour", "Ground"]


class Colour(NamedTuple):
    """How a role looks.

    Attributes:
        light: on a light ground.
        dark: on a dark ground.
        cname: the nearest of the names that Chrome's trace viewer reserves.
    """

    light: str
    dark: str
    cname: str


class Ground(NamedTuple):
    """What lies behind and around the roles' colours."""

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
