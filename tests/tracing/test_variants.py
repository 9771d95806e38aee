"""A form that was only asked for is not kept."""

from __future__ import annotations

import contextlib

from torch import nn

from hocket.tracing.state import inventory
from hocket.tracing.variants import in_form


class Formed(nn.Module):
    def __init__(self, *forms: str) -> None:
        super().__init__()
        self.forms = forms
        self._hocket_form: str | None = None

    def _hocket_forms(self) -> tuple[str, ...]:
        return self.forms


def test_a_module_without_the_form_takes_its_likeliest_and_all_are_put_back():
    first, second = Formed("loop", "rule"), Formed("rule")
    second._hocket_form = "as before"
    with contextlib.suppress(KeyboardInterrupt), in_form(inventory([first, second], None), "loop"):
        assert (first._hocket_form, second._hocket_form) == ("loop", "rule")
        raise KeyboardInterrupt
    assert (first._hocket_form, second._hocket_form) == (None, "as before")
