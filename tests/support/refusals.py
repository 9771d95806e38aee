"""Calls that fail with an error of ours: most for a user's mistake, which is an `InputError`."""

from collections.abc import Callable
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
