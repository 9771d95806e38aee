"""The site builds without a warning, needs no network to be read, and has every public name and every verb."""

import logging
import re
from pathlib import Path

import pytest

import hocket
from hocket.cli.parser import make_parser

ROOT = Path(__file__).parents[2]


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Build the site as `make docs` does. Return its folder and the warnings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        from mkdocs.commands.build import build
        from mkdocs.config import load_config

        folder, heard = tmp_path_factory.mktemp("site"), Warnings()
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        config.plugins.run_event("startup", command="build", dirty=False)
        loggers = [logging.getLogger(name) for name in ("mkdocs", "griffe")]
        for logger in loggers:
            logger.addHandler(heard)
        try:
            build(config)
        finally:
            for logger in loggers:
                logger.removeHandler(heard)
            config.plugins.run_event("shutdown")
    return folder, heard.messages


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


def test_no_link_or_reference_is_broken(site: tuple[Path, list[str]]) -> None:
    assert site[1] == []


def test_a_page_fetches_nothing(site: tuple[Path, list[str]]) -> None:
    fetched = re.compile(
        r'<(?:script|img|iframe)[^>]* src="?(https?:[^" >]+)|<link rel="?stylesheet"?[^>]* href="?(https?:[^" >]+)'
    )
    pages = list(site[0].rglob("*.html"))
    assert len(pages) > 25
    assert [
        (page.name, found[0]) for page in pages if (found := fetched.search(page.read_text(encoding="utf-8")))
    ] == []


def test_the_reference_has_every_public_name(site: tuple[Path, list[str]]) -> None:
    text = (site[0] / "api" / "index.html").read_text(encoding="utf-8")
    names = {match.rpartition(".")[2] for match in re.findall(r'<h2 id="?([\w.]+)', text)}
    modules = {"distribute", "errors", "lr_scheduler", "optim"}
    assert set(hocket.__all__) - modules - names == set()


def test_the_command_line_has_every_verb(site: tuple[Path, list[str]]) -> None:
    text = (site[0] / "cli" / "index.html").read_text(encoding="utf-8")
    verbs = re.findall(r"^    (\w+) ", make_parser().format_help(), re.MULTILINE)
    assert len(verbs) > 12
    assert [verb for verb in verbs if f"usage: hocket {verb} " not in text] == []


def test_each_paper_has_what_is_built_compared_and_missing() -> None:
    papers = re.split(r"^## ", (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(papers) == 5
    for paper in papers:
        assert re.findall(r"^- \*\*(\w+)\.\*\*", paper, re.MULTILINE) == ["Built", "Compares", "Missing"], paper
