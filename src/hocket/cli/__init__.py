"""The command line: ``hocket VERB ...``, one verb per arrow from a training step to its report."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv`, of the process's own arguments if None, and return the exit status.

    0 done, 1 the work failed, 2 a usage error, 130 interrupted.
    """
    from hocket.cli.arguments import run_command
    from hocket.cli.parser import make_parser

    return run_command(make_parser(), argv)
