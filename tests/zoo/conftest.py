"""One thread: tiny models gain nothing from more, and lose much on a machine that does other work too."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None: ...
