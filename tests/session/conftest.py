"""Reset the probing op after each test."""

from collections.abc import Iterator

import pytest

from execution.probe import forget


@pytest.fixture(autouse=True)
def _nothing_meanwhile() -> Iterator[None]:
    yield
    forget()
