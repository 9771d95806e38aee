"""Every Python block of README and docs runs, and prints the output that stands below it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.docs.preludes import BLOCKS, ITSELF

import forked

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# They fit two hundred regressions, partition a large graph, and load four libraries (tests/dynamo/test_frameworks.py).
SLOW = {"models 2", "partition 0", "compile 2"}


class Block(NamedTuple):
    name: str
    place: str
    line: int
    code: str
    output: str | None


def blocks() -> list[Block]:
    """Return all Python blocks, each with the block without a language that directly follows it, if any."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        fences = list(FENCE.finditer(text))
        python = [number for number, fence in enumerate(fences) if fence[1] == "python"]
        for index, number in enumerate(python):
            fence, after = fences[number], (fences[number + 1 :] or [None])[0]
            follows = after is not None and not after[1] and not text[fence.end() : after.start()].strip()
            line = text[: fence.start()].count("\n") + 1
            output = after[2] if follows else None
            found.append(Block(f"{page.stem} {index}", str(page.relative_to(ROOT)), line, fence[2], output))
    return found


def program(block: Block) -> str:
    """Return a program whose tracebacks name the line of the page."""
    around = BLOCKS.get(block.name, ITSELF)
    return (
        f"import os\nexec(compile({around.before!r}, 'before {block.name}', 'exec'), globals())\n"
        f"exec(compile({chr(10) * block.line + block.code!r}, {block.place!r}, 'exec'), globals())\n"
        f"exec(compile({around.after!r}, 'after {block.name}', 'exec'), globals())\n"
    )


def is_shown(printed: str, shown: str) -> bool:
    """Compare outputs; the decision of a schedule is that of this machine and this moment."""
    if re.fullmatch(r"planned because plan '\w+' on \d lane\(s\) takes 0\.\d+x of eager's time .*\n", shown):
        return re.fullmatch(r"(planned|eager) because .*\n", printed) is not None
    return printed == shown


def test_code_around_blocks_is_that_of_blocks() -> None:
    assert BLOCKS.keys() <= {block.name for block in blocks()}


def test_each_block_of_the_readme_shows_its_output() -> None:
    assert all(block.output for block in blocks() if block.place == "README.md")


def test_every_link_to_a_file_leads_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))]
    files = [(page, link) for page, link in links if not link.startswith(("http:", "https:", "mailto:"))]
    assert len(files) > 50
    assert [f"{page.name}: {link}" for page, link in files if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.name, marks=[pytest.mark.slow] if block.name in SLOW else [])
        for block in blocks()
        if BLOCKS.get(block.name, ITSELF).ranks == 1
    ],
)
def test_a_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = forked.run(program(block), timeout_s=500, warn="error" if block.place == "README.md" else "ignore")
    assert done.returncode == 0, done.stderr
    if block.output is not None:
        assert is_shown(done.stdout, block.output), done.stdout


@pytest.mark.slow  # processes that wait for each other, for minutes on a busy machine
@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.name) for block in blocks() if BLOCKS.get(block.name, ITSELF).ranks > 1]
)
def test_a_block_of_a_job_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(program(block), encoding="utf-8")
    # torchrun makes the store itself, and where a rank fails it ends the others and shows why.
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(BLOCKS[block.name].ranks)]
    done = subprocess.run(
        [sys.executable, *words, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
