"""Pages of the site that are made from the code or from files beside `docs`, when the site is built."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# What no page shows is found in the repository.
SOURCES = "https://github.com/hocket/hocket/blob/main/"


class ExampleSections(griffe.Extension):
    """Read a section ``Example:`` as code, which griffe does for ``Examples:`` alone."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "cli.md": command_line(),
        "api.md": reference(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Send links to files that the site does not have to the repository."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    if page.file.src_uri in ("contributing.md", "changelog.md"):
        folder = ROOT

    def resolved(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = (folder / path).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        docs = ROOT / "docs"
        if target.is_relative_to(docs) and files.get_file_from_path(target.relative_to(docs).as_posix()):
            depth = page.file.src_uri.count("/")
            return f"]({'../' * depth}{target.relative_to(docs).as_posix()}{anchor})"
        return f"]({SOURCES}{target.relative_to(ROOT).as_posix()}{anchor})"

    return re.sub(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)", resolved, markdown)


def command_line() -> str:
    """Return the page of all verbs, as their own help says it."""
    from hocket.cli.parser import make_parser

    parser = make_parser()
    (verbs,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    parts = ["# Command line", "```text\n" + parser.format_help().rstrip() + "\n```"]
    parts += [
        f"## hocket {name}\n\n```text\n{verb.format_help().rstrip()}\n```" for name, verb in verbs.choices.items()
    ]
    return "\n\n".join(parts) + "\n"


def reference() -> str:
    """Return the page of all public names, from their docstrings."""
    import hocket

    groups = [
        ("hocket", [name for name in hocket.__all__ if name not in ("distribute", "errors", "lr_scheduler", "optim")]),
        ("hocket.distribute", _names("hocket.distribute")),
        ("hocket.loading", _names("hocket.loading")),
        ("hocket.optim", _names("hocket.optim")),
        ("hocket.lr_scheduler", _names("hocket.lr_scheduler")),
        ("hocket.dynamo", _names("hocket.dynamo")),
        ("hocket.errors", _names("hocket.errors")),
    ]
    parts = ["# Python reference", "Every public name, with shapes, units, errors and an example."]
    for module, names in groups:
        parts += [f"# {module}", *(f"::: {_place(module, name)}" for name in names)]
    return "\n\n".join(parts) + "\n"


def _names(module: str) -> list[str]:
    from importlib import import_module

    found = import_module(module)
    names = getattr(found, "__all__", None)
    return list(names) if names is not None else [name for name in vars(found) if name[0].isupper()]


def _place(module: str, name: str) -> str:
    """Return the dotted path of the definition, which a lazy public name does not show."""
    from importlib import import_module

    value = getattr(import_module(module), name)
    where = getattr(value, "__module__", None)
    return f"{where}.{value.__name__}" if where and hasattr(value, "__name__") else f"{module}.{name}"
