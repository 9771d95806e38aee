"""Measure the power of the tests by mutants: seeded faults in the correctness core.

`python -m tests.support.mutants --count 120 --seed 0 [--package execution]` draws mutants evenly over the packages,
applies one at a time to a temporary copy of the tree, and runs the tests of its package and the equivalence tests, for
packages that watch and record steps the loops as well.
A mutant is caught where they fail or exceed the time limit. The results lie beside each other as JSON and as a text
table. A second call with the same draw continues after the last finished mutant.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ["ir", "pystate", "tracing", "execution", "fusion", "optim", "search", "checking"]
LOOPS = ("pystate", "tracing")
FLIPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One fault: the bytes `start` to `end` of the file at `path` become `text`."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    @property
    def package(self) -> str:
        return Path(self.path).parts[2]

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def _replacement(node: ast.AST) -> tuple[str, str] | None:
    """Return the kind of fault and the text that replaces the node, or None where no fault applies to it."""
    match node:
        case ast.Compare(left, [op], [right]):
            return "comparison", f"({ast.unparse(ast.Compare(left, [FLIPPED[type(op)]()], [right]))})"
        case ast.Constant(value) if type(value) is int:
            return "off by one", str(value + 1)
        case ast.Call(function, [first, second, *rest], keywords) if not any(
            isinstance(one, ast.Starred) for one in (first, second)
        ) and ast.dump(first) != ast.dump(second):
            return "arguments", ast.unparse(ast.Call(function, [second, first, *rest], keywords))
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            return "removed line", "pass"
    return None


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of function bodies: no annotations, and no f-strings, whose offsets Python 3.11 gets wrong."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from _code(child)


def mutants_of(path: Path) -> list[Mutant]:
    """Return all mutants of one file, in the order of its code."""
    source = path.read_bytes()
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in _code(function):
            if replaced := _replacement(node):
                kind, text = replaced
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                found[start, end, kind] = Mutant(str(path.relative_to(ROOT)), node.lineno, kind, start, end, text)
    return [found[key] for key in sorted(found)]


def draw(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants, as many of each package as of the next, and of each kind where the package has it."""
    rng = random.Random(seed)
    queues = []
    for package in packages:
        paths = sorted((ROOT / "src" / "hocket" / package).rglob("*.py"))
        kinds: dict[str, list[Mutant]] = {}
        for mutant in (one for path in paths for one in mutants_of(path)):
            kinds.setdefault(mutant.kind, []).append(mutant)
        for of_kind in kinds.values():
            rng.shuffle(of_kind)
        queues.append(list(_in_turn(list(kinds.values()))))
    return list(_in_turn(queues))[:count]


def _in_turn(queues: list[list[Mutant]]) -> Iterator[Mutant]:
    for place in range(max(map(len, queues), default=0)):
        yield from (queue[place] for queue in queues if place < len(queue))


def _tests_fail(tree: Path, package: str, limit_s: float) -> str:
    """Return "survived" where the tests pass, otherwise the first failure or error that pytest names."""
    names = [f"tests/{package}", "tests/equivalence", *(["tests/loops"] if package in LOOPS else [])]
    folders = [name for name in names if (tree / name).is_dir()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *folders]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    tests = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that processes of the tests end with them
    )
    try:
        output, _ = tests.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "the time limit"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
    if tests.returncode == 0:
        return "survived"
    named = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return named[0] if named else f"exit status {tests.returncode}"


def _table(results: list[dict]) -> str:
    lines = [f"{'package':<12}{'caught':>8}{'survived':>10}"]
    for package in sorted({one["package"] for one in results}):
        ends = [one["end_of_tests"] == "survived" for one in results if one["package"] == package]
        lines.append(f"{package:<12}{len(ends) - sum(ends):>8}{sum(ends):>10}")
    survivors = [one for one in results if one["end_of_tests"] == "survived"]
    lines += ["", "Survivors:"] if survivors else []
    lines += [f"  {one['path']}:{one['line']} {one['kind']}: {one['text']}" for one in survivors]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Run the mutants and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120, help="mutants in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", action="append", choices=CORE, help="only this package; may be repeated")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for the tests of one mutant")
    parser.add_argument("--out", type=Path, default=Path("build/mutants.json"), help="the table, as JSON and .txt")
    options = parser.parse_args(arguments)
    mutants = draw(options.package or CORE, options.count, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {json.dumps(one["mutant"]): one for one in known}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "shared")
        shutil.copytree(ROOT, tree, ignore=ignored)
        left = [one for one in mutants if json.dumps(asdict(one)) not in done]
        for package in sorted({one.package for one in left}):
            if (end := _tests_fail(tree, package, options.limit)) != "survived":
                raise SystemExit(f"the tests of {package} fail without a mutant: {end}")
        for mutant in left:
            file = tree / mutant.path
            source = file.read_bytes()
            file.write_bytes(mutant.applied(source))
            end = _tests_fail(tree, mutant.package, options.limit)
            file.write_bytes(source)
            done[json.dumps(asdict(mutant))] = {
                "package": mutant.package,
                "path": mutant.path,
                "line": mutant.line,
                "kind": mutant.kind,
                "text": mutant.text,
                "end_of_tests": end,
                "mutant": asdict(mutant),
            }
            written = options.out.with_suffix(".part")
            written.write_text(json.dumps(list(done.values()), indent=1))
            written.replace(options.out)
            print(f"{mutant.path}:{mutant.line} {mutant.kind}: {end}", flush=True)
    results = [done[json.dumps(asdict(one))] for one in mutants]
    options.out.with_suffix(".txt").write_text(_table(results))
    print(_table(results))


if __name__ == "__main__":
    main()
