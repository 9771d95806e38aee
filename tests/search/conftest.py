"""Optuna says each trial it makes; tests need not see it."""

from __future__ import annotations

import optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)
