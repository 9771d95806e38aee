"""Rules that keep the package easy to read: unique names, short files, imports without circles, nothing twice."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = sorted(chain.from_iterable((SRC / "hocket").rglob(f"*.{kind}") for kind in ("py", "cpp", "h")))
PYTHON = [path for path in FILES if path.suffix == ".py"]
MAX_LINES = 400
parsed = functools.cache(ast.parse)  # each source is parsed once for all rules

MAX_SHARED = 11  # lines in a row that may stand in two places


def named(path: Path) -> str:
    return str(path.relative_to(SRC))


def repeated_classes(sources: dict[str, str]) -> list[str]:
    """Class names, nested ones too, that are defined more than once."""
    places = defaultdict(list)
    for name, text in sources.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def imports(text: str, modules: set[str]) -> set[str]:
    """The modules that a source imports: at its top, inside a function, or for types alone."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & modules or {str(node.module)}
    return found & modules


def import_circles(sources: dict[str, str]) -> list[set[str]]:
    """Groups of modules of which each imports, directly or not, every other one."""
    graph = {module: imports(text, set(sources)) - {module} for module, text in sources.items()}

    def reached(module: str) -> set[str]:
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            for other in graph[ahead.pop()] - seen:
                seen.add(other)
                ahead.append(other)
        return seen

    onward = {module: reached(module) for module in graph}
    groups = {frozenset(other for other in onward[module] if module in onward[other]) for module in graph}
    return [set(group) for group in groups if group]


def repeated_lines(sources: dict[str, str], shared: int = MAX_SHARED) -> list[str]:
    """Places at which more than `shared` lines in a row stand twice, without blank lines and comments."""

    def lines(text: str) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(text.splitlines(), 1):
            bare = line.strip()
            if bare and not bare.startswith(("#", "//")):
                yield number, bare

    places: dict[tuple[str, ...], str] = {}
    found = []
    for name, text in sources.items():
        kept = list(lines(text))
        for at in range(len(kept) - shared):
            window = tuple(line for _, line in kept[at : at + shared + 1])
            place = f"{name}:{kept[at][0]}"
            if places.setdefault(window, place) != place:
                found.append(f"{places[window]} ~ {place}")
    return found


def modules() -> dict[str, str]:
    names = {path: ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for path in PYTHON}
    return {names[path]: path.read_text() for path in PYTHON}


def test_no_class_name_stands_twice():
    assert repeated_classes({named(path): path.read_text() for path in PYTHON}) == []


def test_no_file_is_long():
    lengths = {named(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_no_modules_import_each_other():
    assert import_circles(modules()) == []


def test_no_twelve_lines_stand_twice():
    assert repeated_lines({named(path): path.read_text() for path in FILES}) == []


@pytest.mark.parametrize("late", ["", "def f():\n    ", "if TYPE_CHECKING:\n    "])
def test_a_circle_is_found_wherever_the_import_runs(late):
    sources = {"p.a": "import p.b", "p.b": "from p import c", "p.c": f"{late}from p.a import x", "p.d": "import p.a"}
    assert import_circles(sources) == [{"p.a", "p.b", "p.c"}]


def test_a_nested_class_and_a_moved_block_are_found():
    assert repeated_classes({"a": "class A: ...", "b": "class B:\n    class A: ..."}) == ["A: a:1, b:2"]
    block = "\n".join(f"x{number} = {number}" for number in range(4))
    sources = {"a": block, "b": f"def f():\n    {block}\n".replace("\n", "\n\n    # why\n")}
    assert repeated_lines(sources, shared=3) == ["a:1 ~ b:4"]
    assert repeated_lines(sources, shared=4) == []


def test_the_walk_of_contributing_stays_short():
    text = (SRC.parent / "CONTRIBUTING.md").read_text()
    table = [line for line in text.split("### From `schedule()`")[1].split("\n## ")[0].splitlines() if "|" in line]
    walk = [SRC.parent / path for line in table for path in re.findall(r"\]\(([^)]+)\)", line)]
    assert len(set(walk)) == len(walk) <= 30
    assert sum(len(path.read_text().splitlines()) for path in walk) <= 5500
