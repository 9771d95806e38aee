"""Loaded last where processes are forked from: what is there by now is left out of every collection of garbage.

A process that looks through it has to copy it all, once while it runs, and once more where the interpreter ends.
"""

import gc

from support.partition_core import load_shared

load_shared()
gc.collect()
gc.freeze()
