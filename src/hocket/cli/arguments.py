"""What the parsers of `hocket` and of the benchmarks share: verbs, their common options, and exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hocket.cli.console import UsageError
from hocket.errors import HocketError

__all__ = ["Parser", "Verbs", "add_output", "add_verb", "count", "run_command"]

DONE, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help in which all verbs have theirs beside them: Python 3.11 forgets how far verbs are indented."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            longest = max((len(name) for name in action.choices), default=0)
            self._action_max_length = max(self._action_max_length, longest + 4)


class Parser(argparse.ArgumentParser):
    """A parser that takes options by their whole names only: a shortened one would change meaning with a new one."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **settings)


Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_verb(
    verbs: Verbs, name: str, work: Callable[[argparse.Namespace], None], summary: str, example: str, more: str = ""
) -> argparse.ArgumentParser:
    """A verb with the options that all verbs have; `work` becomes the ``work`` of its arguments."""
    description = f"{summary[0].upper()}{summary[1:]}." + (f"\n\n{more}" if more else "")
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=summary, description=description, epilog=f"example:\n  {example}"
    )
    parser.set_defaults(work=work)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="json: one object on stdout")
    parser.add_argument("--traceback", action="store_true", help="where an error came from, in full")
    return parser


def add_output(parser: argparse.ArgumentParser, what: str, *, required: bool = False) -> None:
    """The option ``-o FILE``."""
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=required, help=f"where to write {what}")


def count(text: str) -> int:
    """The type of an argument that is a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, the process's own arguments if None, and do the work; without a verb, print the help.

    Returns:
        The exit status: 0 done, 1 the work failed, 2 a usage error, 130 interrupted. An error is one line on stderr,
        after its traceback with ``--traceback``.
    """
    parser.set_defaults(work=lambda _: parser.print_help(), traceback=False)
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    try:
        args.work(args)
        sys.stdout.flush()
    except UsageError as error:
        return _failure(parser.prog, error, USAGE_ERROR, args.traceback)
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter's last flush must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (HocketError, OSError) as error:
        return _failure(parser.prog, error, FAILED, args.traceback)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as leaving:  # rich ends so where nobody reads its output any more
        return int(leaving.code or 0)
    return DONE


def _failure(program: str, error: Exception, status: int, in_full: bool) -> int:
    if in_full:
        traceback.print_exception(error)
    message = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        message = f"{error.filename}: {error.strerror}"
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return status
