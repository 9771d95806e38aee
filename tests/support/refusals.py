"""Calls that fail with an error of ours: most for a user's mistake, which is an `InputError`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import HocketError, InputError


def fails(error: type[HocketError], match: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """The call raises an error of this kind whose message has a part that matches."""
    with pytest.raises(error, match=match):
        call(*args, **options)


def refused(match: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """The call raises an `InputError` whose message has a part that matches."""
    fails(InputError, match, call, *args, **options)


def line_at_fault(body: Callable[..., Any]) -> str:
    """The file and the line of a function that has the mark "here"."""
    lines, first = inspect.getsourcelines(body)
    at = next(number for number, line in enumerate(lines, first) if "# here" in line)
    return f"{Path(inspect.getfile(body)).name}:{at}"
