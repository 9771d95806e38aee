"""The command line: ``hocket VERB ...``, one verb per arrow from a training step to its report.

Each verb raises what goes wrong; here it becomes one line and an exit status.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from hocket.errors import HocketError

__all__ = ["main"]

DONE, FAILED, WRONG_WORDS, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the words say, those of the command line when none are given; returns the exit status.

    0 done, 1 the work failed, 2 the words were wrong, 130 interrupted.
    """
    from hocket.cli.console import UsageError
    from hocket.cli.parser import make_parser

    parser = make_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    if args.verb is None:
        parser.print_help()
        return DONE
    try:
        args.work(args)
        sys.stdout.flush()
    except UsageError as error:
        return _told(error, WRONG_WORDS, args.traceback)
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter's last flush must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (HocketError, OSError) as error:
        return _told(error, FAILED, args.traceback)
    except KeyboardInterrupt:
        print("hocket: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as leaving:  # rich ends so where nobody reads its output any more
        return int(leaving.code or 0)
    return DONE


def _told(error: Exception, status: int, in_full: bool) -> int:
    if in_full:
        traceback.print_exception(error)
    message = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        message = f"{error.filename}: {error.strerror}"
    print(f"hocket: error: {' '.join(message.split())}", file=sys.stderr)
    return status
