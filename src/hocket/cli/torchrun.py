"""Verbs that are run by several ranks: torchrun starts them on this machine, or has started this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.errors import HocketError

__all__ = ["start_ranks", "started_by_torchrun", "words_of"]

# What torchrun tells each process that it starts.
_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_by_torchrun() -> bool:
    """Whether this process is a rank."""
    return all(name in os.environ for name in _TOLD)


def start_ranks(target: str, ranks: int, words: Iterable[str]) -> None:
    """Start all ranks on this machine, each with the same command line, and wait for their end.

    Args:
        target: what errors call the work.
        ranks: how many.
        words: of the command line, behind ``hocket``.

    Raises:
        HocketError: one of them has failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if subprocess.run([*command, "-m", "hocket", *words], check=False).returncode:
        raise HocketError(f"{target}: a rank has failed; what it said stands above")


def words_of(
    verb: str, target: str, options: Mapping[str, Any], settings: Iterable[tuple[str, Any]], flags: Mapping[str, bool]
) -> list[str]:
    """A command line of a verb again: options that have a value, settings of the target, and flags that are set."""
    words = [verb, target]
    for option, value in options.items():
        words += [option, str(value)] if value is not None else []
    for key, value in settings:
        words += ["--set", f"{key}={value}"]
    return [*words, *(flag for flag, is_set in flags.items() if is_set)]
