"""Calls that are refused for a user's mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hocket.errors import InputError


def refused(match: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """The call raises an `InputError` whose message has a part that matches."""
    with pytest.raises(InputError, match=match):
        call(*args, **options)
