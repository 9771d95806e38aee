"""Every example of README.md runs as it stands, and prints what stands below it, but for what only one machine says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str, str]]:
    """Yield the place, the text and the shown output, if any, of every Python block."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    found = []
    for number, block in enumerate(blocks):
        if block[1] == "python":
            after = blocks[number + 1] if number + 1 < len(blocks) else None
            is_output = after is not None and after[1] == "" and not text[block.end() : after.start()].strip()
            line = text[: block.start()].count("\n") + 1
            found.append((f"line {line}", block[2], after[2] if after is not None and is_output else ""))
    return found


def test_there_are_examples_with_outputs():
    assert examples()
    assert all(shown for _, _, shown in examples())


@pytest.mark.parametrize(("where", "code", "shown"), [pytest.param(*each, id=each[0]) for each in examples()])
def test_an_example_prints_what_is_shown(where, code, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = forked.run(code, timeout_s=500, warn="error")
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    if "fast.verdict" in code:  # that of this machine
        assert re.fullmatch(r"(planned|eager) because .*\n", printed), printed
        assert re.fullmatch(r"planned because plan '\w+' on \d lane\(s\) takes 0\.\d+x of eager's time .*\n", shown)
    else:
        assert printed == shown, where


def test_every_link_to_a_file_leads_there():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))]
    files = [(page, link) for page, link in links if not link.startswith(("http:", "https:", "mailto:"))]
    assert len(files) > 50
    assert [f"{page.name}: {link}" for page, link in files if not (page.parent / link).exists()] == []
