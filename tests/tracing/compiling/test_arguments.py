"""Arguments as text: what is written reads back equal, and nothing else reads."""

from typing import Any

import pytest
import torch

from hocket.errors import CaptureError
from hocket.tracing.compiling.arguments import decoded, encoded, op_named, op_text
from support.refusals import fails


def test_arguments_read_back() -> None:
    given: list[Any] = [None, True, 3, -0.5, float("inf"), "mean", [1, [2]], torch.float32, torch.strided]
    given += [torch.preserve_format, torch.device("cpu")]
    assert decoded(encoded(given, lambda _: None), lambda *_: None) == given


@pytest.mark.parametrize("text", [{"dtype": "Tensor"}, {"layout": "float32"}, {"code": "x"}])
def test_other_text_is_refused(text: Any) -> None:
    fails(CaptureError, "a compiled list holds", decoded, text, lambda *_: None)


def test_what_has_no_text_is_refused() -> None:
    fails(CaptureError, "an op is given a complex", encoded, 1j, lambda _: None)


def test_ops_are_named() -> None:
    assert op_named(op_text(torch.ops.aten.mm.default)) is torch.ops.aten.mm.default
    fails(CaptureError, r"has no op aten\.unheard\.of", op_named, "aten.unheard.of")
    fails(CaptureError, "is not an op of torch's dispatcher", op_text, torch.relu)
