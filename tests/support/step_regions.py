"""Regions of scheduled steps without a wait, and kept whatever they cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from hocket import step_regions
from hocket.autotune import comparison, pool
from hocket.dynamo import region

# Calls after which a small step whose first calls are refused has its regions.
MANY = 80


@contextmanager
def regions_at_once() -> Iterator[None]:
    """Let steps that are scheduled without a guard have regions after a few calls."""
    config = region._config

    def unguarded(*args: Any) -> Any:
        return replace(config(*args), guard=False)

    with (
        mock.patch.object(pool, "MAX_REFUSED", 1),
        mock.patch.multiple(comparison, NUM_ROUNDS=1, MAX_ATTEMPTS=1),
        mock.patch.multiple(step_regions, ATTEMPT_S=0.0, MODULE_S=0.0, MAX_OVERRUN=float("inf"), NUM_LOOKS=2),
        mock.patch.object(region, "_config", unguarded),
    ):
        yield
