"""Docstrings and comments are plain English: the subject first, and no words of a private dialect."""

import ast
import functools
import re
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "hocket"
OPENINGS = {"What", "Whether", "Of", "Who", "Whose", "How", "Whoever", "Nobody", "So"}
WORDS = re.compile(r"\b(nobody|somebody|whoever|everybody|so many|so much|told|made of it)\b", re.IGNORECASE)
# The share of docstrings with a semicolon. Drawings, formulas and lists hold some.
MAX_SEMICOLONS = 0.01


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Return the place of each docstring and its text without the example."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    texts = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, documented) and (found := ast.get_docstring(node)):
                line = getattr(node, "lineno", 1)
                texts.append((f"{path.relative_to(SOURCES)}:{line}", found.partition("Example:")[0]))
    return texts


def comments() -> list[tuple[str, str]]:
    """Return the place of each comment with lines of its own, in Python and C++, and its first line."""
    found = []
    for path in sorted(each for pattern in ("*.py", "*.h", "*.cpp") for each in SOURCES.rglob(pattern)):
        mark = "#" if path.suffix == ".py" else "//"
        within = False
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            is_comment = text.lstrip().startswith(f"{mark} ")
            if is_comment and not within:
                found.append((f"{path.relative_to(SOURCES)}:{line}", text.lstrip()[len(mark) :]))
            within = is_comment
    return found


def test_none_opens_with_a_question_word() -> None:
    assert [where for where, text in docstrings() + comments() if text.split()[0].rstrip(",.:") in OPENINGS] == []


def test_words_of_a_dialect_are_gone() -> None:
    assert [f"{where}: {found[0]}" for where, text in docstrings() + comments() if (found := WORDS.search(text))] == []


def test_hardly_any_holds_a_semicolon() -> None:
    found = [";" in text for _, text in docstrings()]
    assert len(found) > 3000
    assert sum(found) <= MAX_SEMICOLONS * len(found)
