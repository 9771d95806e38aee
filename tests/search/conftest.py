"""Optuna says each trial it makes, which tests need not see; what one search found out is not known to the next one."""

from __future__ import annotations

import optuna
import pytest

from hocket.search import group

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture(autouse=True)
def _nothing_known():
    group.TOGETHER.clear()
