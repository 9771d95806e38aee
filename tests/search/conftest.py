"""Optuna says each trial it makes, which tests need not see; and nothing waits for the disk."""

from __future__ import annotations

import os

import optuna
import pytest
from tests.search import unsynced

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", unsynced.fsync)
