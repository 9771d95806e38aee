"""The C++ core of the partition search, shared by all test processes, as native lanes are.

Each test has a cache folder of its own, in which a process would compile the core anew, for ten seconds.
"""

import os
import sys

# The variable that names the user's own cache folder while a test has another one.
USERS_CACHE = "HOCKET_TESTS_USERS_CACHE"


def note_users_cache() -> None:
    """Note the user's own cache folder, before any test has another one."""
    os.environ.setdefault(USERS_CACHE, os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def load_shared() -> None:
    """Load the core from the user's own cache folder, if this process has imported the search."""
    compiled = sys.modules.get("hocket.planning.partition.compiled")
    if compiled is None:
        return
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = os.environ[USERS_CACHE]
    try:
        compiled.why_not()
    finally:
        os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)
