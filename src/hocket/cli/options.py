"""Options that several verbs of the command line have, and how their values are read."""

from __future__ import annotations

import argparse
from pathlib import Path

from hocket.cli.arguments import count
from hocket.errors import HocketError
from hocket.ir import Machine

__all__ = [
    "TARGET_WORDS",
    "existing_path",
    "gpu_machine",
    "input_file",
    "input_files",
    "joint_option",
    "machine_option",
    "target_options",
    "widths_of",
]

TARGET_WORDS = """\
TARGET is a name that `hocket zoo` lists, or file.py:function, a function
without arguments that returns hocket.Job(step, model, optimizer, batches)."""


def target_options(parser: argparse.ArgumentParser, name: str = "TARGET") -> argparse._ArgumentGroup:
    """The target and the options of zoo targets, which may be added to."""
    parser.add_argument("target", metavar=name, help="a zoo name, or file.py:function")
    zoo = parser.add_argument_group("options of zoo targets")
    zoo.add_argument("--batch-size", type=count, metavar="N", help="examples in a batch (the entry's own)")
    zoo.add_argument("--optimizer", metavar="NAME", help="sgd, adam or adamw (the entry's own)")
    zoo.add_argument("--seed", type=int, metavar="N", help="of weights and data (0)")
    zoo.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="a setting that `hocket zoo` lists, or lr or num_batches; may be given again",
    )
    return zoo


def input_files(parser: argparse.ArgumentParser, *names: str) -> None:
    """Files that a verb reads, in this order."""
    for name in names:
        parser.add_argument(name.lower(), type=input_file, metavar=name, help=f"a {name.lower()} file")


def machine_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--machine FILE``."""
    parser.add_argument("--machine", type=input_file, metavar="FILE", help="what to plan for (this machine)")


def joint_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--joint``."""
    parser.add_argument("--joint", action="store_true", help="leave a convolution's backward in one piece")


def existing_path(text: str) -> Path:
    """A file or a folder that is there."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


def input_file(text: str) -> Path:
    """A file that is there."""
    path = existing_path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    return path


def gpu_machine(text: str) -> Machine:
    """A machine by the name of its GPU or from its file."""
    try:
        return Machine.load(text) if Path(text).exists() else Machine.preset(text)
    except HocketError as error:
        raise argparse.ArgumentTypeError(f"{error}; or a machine file") from None


def widths_of(text: str) -> list[int]:
    """``1,2,4`` as numbers, the least first."""
    return sorted({count(word) for word in text.split(",")})


def setting(text: str) -> tuple[str, int | float | str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, such as image_size=64, got {text!r}")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value
