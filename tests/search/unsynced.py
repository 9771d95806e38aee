"""Nothing of a search waits for the disk in tests.

Tests kill processes, and what a process has written outlives it. Only a machine that fails loses what is not synced.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine


@event.listens_for(Engine, "connect")
def _unsynced(connection: Any, record: Any) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


def fsync(file: Any) -> None:
    """Stand for `os.fsync`."""
