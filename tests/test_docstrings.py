"""Docstrings and comments are plain English: the subject first, and no words of a private dialect."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/hocket", "benchmarks", "tests")
OPENINGS = {"What", "Whether", "Of", "Who", "Whose", "How", "Whoever", "Nobody", "So"}
WORDS = re.compile(r"\b(nobody|somebody|whoever|everybody|so many|so much|told|made of it)\b", re.IGNORECASE)
# The share of docstrings of the package with a semicolon. Drawings, formulas and lists hold some.
MAX_SEMICOLONS = 0.01


def files(*patterns: str) -> list[Path]:
    """Return the files of the project with these endings."""
    return sorted(each for folder in FOLDERS for pattern in patterns for each in (ROOT / folder).rglob(pattern))


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Return the place of each docstring and its text without the example."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    texts = []
    for path in files("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, documented) and (found := ast.get_docstring(node)):
                line = getattr(node, "lineno", 1)
                texts.append((f"{path.relative_to(ROOT)}:{line}", found.partition("Example:")[0]))
    return texts


def comments() -> list[tuple[str, str]]:
    """Return the place of each comment with lines of its own, in Python and C++, and its first line."""
    found = []
    for path in files("*.py", "*.h", "*.cpp"):
        mark = "#" if path.suffix == ".py" else "//"
        within = False
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            is_comment = text.lstrip().startswith(f"{mark} ")
            if is_comment and not within:
                found.append((f"{path.relative_to(ROOT)}:{line}", text.lstrip()[len(mark) :]))
            within = is_comment
    return found


def test_none_opens_with_a_question_word() -> None:
    assert [where for where, text in docstrings() + comments() if text.split()[0].rstrip(",.:") in OPENINGS] == []


def test_words_of_a_dialect_are_gone() -> None:
    assert [f"{where}: {found[0]}" for where, text in docstrings() + comments() if (found := WORDS.search(text))] == []


def test_hardly_any_holds_a_semicolon() -> None:
    found = [";" in text for where, text in docstrings() if where.startswith(FOLDERS[0])]
    assert len(found) > 3000
    assert sum(found) <= MAX_SEMICOLONS * len(found)
