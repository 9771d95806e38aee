"""Optuna says each trial it makes, which tests need not see."""

from __future__ import annotations

import optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)
