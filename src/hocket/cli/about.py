"""Versions for a bug report, and completion of verbs and options for a shell."""

from __future__ import annotations

import argparse
import platform
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hocket.cache_folder import find_compiler
from hocket.cli.console import emit, print_json
from hocket.ir.limits import processor_name, usable_cpus
from hocket.version import VERSION

SHELLS = ("bash", "zsh", "fish")


class VersionAction(argparse.Action):
    """``--version``: print one line and leave, or, with ``--json``, what a bug report needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        words = parser.get_default("words") or []
        if "--version" not in words:
            parser.error(f"{self.option_strings[0]}: only with --version (a verb has --format json)")
        if "--json" in words:
            print_json(_versions())
        else:
            print(f"hocket {VERSION}")
        parser.exit()


def _versions() -> dict[str, Any]:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    return {
        "hocket": VERSION,
        "python": platform.python_version(),
        "torch": torch,
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": usable_cpus(),
        "compiler": _compiler(),
    }


def _compiler() -> str | None:
    """Return the first line that the C++ compiler says of itself, or None without one."""
    found = find_compiler()
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return said[0] if said else found


def print_completion(args: Namespace, parser: argparse.ArgumentParser) -> None:
    """SHELL to a script that completes verbs and their options."""
    script = completion_of(parser, args.shell)
    emit(args, {"shell": args.shell, "script": script}, script)


def completion_of(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script for `shell` (of `SHELLS`) that completes the verbs of `parser` and their options."""
    verbs = dict(_words_of(parser))
    if shell == "fish":
        names = " ".join(name for name in verbs if name)
        first = f"complete -c hocket -n 'not __fish_seen_subcommand_from {names}' -f -a '{names} {verbs['']}'"
        rest = [
            f"complete -c hocket -n '__fish_seen_subcommand_from {name}' -a '{words}'"
            for name, words in verbs.items()
            if name
        ]
        return "\n".join([first, *rest])
    cases = [f"    {name}) words='{words}' ;;" for name, words in verbs.items() if name]
    names = " ".join(name for name in verbs if name)
    lines = [
        "_hocket() {",
        "  local words current=${COMP_WORDS[COMP_CWORD]}",
        '  case "${COMP_WORDS[1]}" in',
        *cases,
        "    *) words='' ;;",
        "  esac",
        f"  [ \"$COMP_CWORD\" -eq 1 ] && words='{names} {verbs['']}'",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _hocket hocket",
    ]
    # zsh reads completions of bash.
    before = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"]
    return "\n".join([*(before if shell == "zsh" else []), *lines])


def _words_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each verb with its options and choices. The parser's own options have the empty name."""
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, made in action.choices.items():
                yield from _words_of(made, verb)
        else:
            words += [word for word in action.option_strings if word.startswith("--")]
            words += [str(choice) for choice in action.choices or () if not action.option_strings]
    yield name, " ".join(words)
