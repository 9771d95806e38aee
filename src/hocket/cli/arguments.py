"""Verbs of a command line as a table, their common options, and exit statuses, for `hocket` and the benchmarks."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.cli.console import UsageError, prepare_streams
from hocket.errors import HocketError
from hocket.reporting.words import count_text, plain

DONE, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE has ended
MAX_ERROR_CHARACTERS = 1000


@dataclass(frozen=True)
class Argument:
    """One call of ``add_argument``."""

    flags: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ArgumentGroup:
    """Arguments under a heading of the help, or, without a title, arguments that exclude each other."""

    title: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Verb:
    """A row of the table of verbs."""

    name: str  # the word on the command line
    work: Callable[[argparse.Namespace], None]  # receives the parsed arguments
    summary: str  # one line of help, which begins in lower case
    example: str  # a whole command line
    arguments: tuple[Argument | ArgumentGroup, ...] = ()  # the verb's own, beside ``--format`` and ``--traceback``
    more: str = ""  # further lines of help


def arg(*flags: str, **settings: Any) -> Argument:
    """Make an argument from those of ``add_argument``."""
    return Argument(flags, settings)


def output(what: str, *, required: bool = False) -> Argument:
    """Make the option ``-o FILE``."""
    return arg("-o", "--output", type=Path, metavar="FILE", required=required, help=f"where to write {what}")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with the summaries beside their verbs: Python 3.11 does not count the indentation of verbs."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            longest = max((len(name) for name in action.choices), default=0)
            self._action_max_length = max(self._action_max_length, longest + 4)


class _Parser(argparse.ArgumentParser):
    """A parser that requires full option names: an abbreviation would change its meaning with a new option.

    Options may stand between the words of a verb, also before its last ones.
    """

    _is_intermixed = False

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is not None or self._is_intermixed:
            return super().parse_known_args(args, namespace)
        self._is_intermixed = True  # Python 3.11 parses intermixed words by calls of this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixed = False


def make_parser_of(
    verbs: Iterable[Verb], *, prog: str, description: str, epilog: str, metavar: str = "VERB"
) -> argparse.ArgumentParser:
    """Make the parser of a table of verbs. The parsed arguments have the verb's function as their ``work``."""
    parser = _Parser(prog=prog, description=description, epilog=epilog)
    title = "verbs" if metavar == "VERB" else "benches"
    places = parser.add_subparsers(metavar=metavar, title=title, dest="verb" if metavar == "VERB" else "bench")
    for verb in verbs:
        about = f"{verb.summary[0].upper()}{verb.summary[1:]}." + (f"\n\n{verb.more}" if verb.more else "")
        example = f"example:\n  {verb.example}"
        made: argparse.ArgumentParser = places.add_parser(
            verb.name, help=verb.summary, description=about, epilog=example
        )
        made.set_defaults(work=verb.work)
        made.add_argument("--format", choices=("table", "json"), default="table", help="json: one object on stdout")
        made.add_argument("--traceback", action="store_true", help="where an error came from, in full")
        _add(made, verb.arguments)
    return parser


def _add(place: argparse._ActionsContainer, arguments: Iterable[Argument | ArgumentGroup]) -> None:
    for each in arguments:
        if isinstance(each, Argument):
            place.add_argument(*each.flags, **each.settings)
        elif each.title:
            _add(place.add_argument_group(each.title), each.arguments)
        else:
            _add(place.add_mutually_exclusive_group(), each.arguments)


def count(text: str) -> int:
    """Parse an argument that is a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def threads(text: str) -> int:
    """Parse an argument that is a number of threads that this machine runs at once. OpenMP crashes at many more."""
    number, processors = count(text), os.cpu_count() or 1
    if number > processors:
        raise argparse.ArgumentTypeError(f"this machine has {count_text(processors, 'processor')}, got {number}")
    return number


def seconds(text: str) -> float:
    """Parse an argument that is a duration in seconds, above 0 and less than a year."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 365 * 86400:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0 and less than a year, got {text!r}")
    return number


def counts_of(text: str) -> list[int]:
    """Parse ``1,2,4``, the smallest first."""
    return sorted({count(word) for word in text.split(",")})


def setting(text: str) -> tuple[str, int | float | str]:
    """Parse ``KEY=VALUE``."""
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, such as image_size=64, got {text!r}")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (the process's own arguments if None) and do the work. Without a verb, print the help.

    Returns:
        The exit status: 0 done, 1 the work failed, 2 a usage error, 130 interrupted, 141 if the reader of the output
        has exited (``| head``). An error is one line on stderr, after its traceback with ``--traceback``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser.set_defaults(work=lambda _: parser.print_help(), traceback=False, words=words)
    prepare_streams()
    try:
        status = _status_of(parser, words)
        sys.stdout.flush()
        return status
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != 1:  # with 1 rich says that the pipe is broken
            raise
        # The interpreter's last flush must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _status_of(parser: argparse.ArgumentParser, words: list[str]) -> int:
    try:
        args = parser.parse_args(words)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    try:
        args.work(args)
    except UsageError as error:
        return _failure(parser.prog, error, USAGE_ERROR, args.traceback)
    except BrokenPipeError:
        raise
    except (HocketError, OSError) as error:
        return _failure(parser.prog, error, FAILED, args.traceback)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return DONE


def _failure(program: str, error: Exception, status: int, in_full: bool) -> int:
    if in_full:
        traceback.print_exception(error)
    message = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        message = f"{error.filename}: {error.strerror}"
    line = plain(" ".join(message.split()))
    if len(line) > MAX_ERROR_CHARACTERS:
        line = f"{line[: MAX_ERROR_CHARACTERS - 200]} ... {line[-195:]}"
    print(f"{program}: error: {line}", file=sys.stderr)
    return status
