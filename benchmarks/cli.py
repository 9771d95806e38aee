"""The command line: ``python -m benchmarks NAME ...``, one name for each bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.verbs import VERBS
from hocket.cli.arguments import make_parser_of, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench of `argv` (the process's own arguments if None), and return the exit status.

    0 done, 1 the work failed, 2 a usage error, 130 interrupted.
    """
    return run_command(make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all benches."""
    return make_parser_of(
        VERBS,
        prog="python -m benchmarks",
        description="Measure Hocket itself, each time against a baseline in the same run.",
        epilog="`python -m benchmarks NAME --help` has an example for each name.\n"
        "Exit status: 0 done, 1 the work failed, 2 a usage error.",
        metavar="NAME",
    )
