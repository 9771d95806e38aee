"""Which forms a step can be captured in, and that nobody keeps a form that was only asked for."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from hocket.tracing.state import inventory
from hocket.tracing.variants import forms_of, in_form


class Formed(nn.Module):
    def __init__(self, *forms: str) -> None:
        super().__init__()
        self.forms = forms
        self._hocket_form: str | None = None

    def _hocket_forms(self) -> tuple[str, ...]:
        return self.forms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_modules_without_forms_leave_one_without_a_name():
    assert forms_of(inventory(nn.Linear(2, 2), None)) == ("",)
    with in_form(inventory(nn.Linear(2, 2), None), ""):
        pass


def test_forms_are_those_of_all_modules_in_the_order_of_the_first():
    places = inventory([nn.Sequential(nn.ReLU(), Formed("loop", "rule")), Formed("rule", "other")], None)
    assert forms_of(places) == ("loop", "rule", "other")


def test_a_module_without_the_form_takes_its_likeliest_and_all_are_put_back():
    first, second = Formed("loop", "rule"), Formed("rule")
    second._hocket_form = "as before"
    with contextlib.suppress(KeyboardInterrupt), in_form(inventory([first, second], None), "loop"):
        assert (first._hocket_form, second._hocket_form) == ("loop", "rule")
        raise KeyboardInterrupt
    assert (first._hocket_form, second._hocket_form) == (None, "as before")
