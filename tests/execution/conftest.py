"""Executors that are closed when their test ends."""

from contextlib import ExitStack, closing

import pytest

from hocket.execution import executor


@pytest.fixture
def started():
    """Makes an executor, with the arguments of `executor`."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(executor(*args, **options)))
