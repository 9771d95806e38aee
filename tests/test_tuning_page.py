"""The page on a search: whole, offline, and of what the search did."""

import re
import sys

import pytest
from tests.search.pieces import LR, SPACE, train
from tests.search.searches import random_study, searched

import hocket
from hocket.errors import MissingDependencyError
from hocket.search.search import device_time_s
from hocket.tuning import write_page
from support.browser import axe_finds, needs_axe, needs_chromium, visit


def test_the_page_shows_slots_values_and_parameters(tmp_path):
    study = hocket.tune(train, SPACE, 6, 3, study=random_study(), halving=hocket.Halving(), report=tmp_path / "page")
    [path] = (tmp_path / "page").iterdir()
    text = path.read_text()
    assert path.name == "index.html"
    assert re.search(r"Trials</dt><dd>6<small>", text)
    assert re.search(r"Fusible.*?lr, step.*?Infusible.*?width", text, re.DOTALL)
    for number in range(6):
        assert f"trial {number}, epoch 1" in text
    assert "What ran with what, and when" in text
    assert "Parameters and values" in text
    assert "Best value so far" in text
    best = text[text.index("<table>") : text.index("</table>")]
    assert f'<th scope="row">{study.best_trial.number}</th>' in best
    assert f">{study.best_value:.6g}</td>" in best
    assert text.index("Best parameters") < text.index("What ran with what, and when")
    assert 'src="http' not in text
    assert study.study_name in text


def test_the_record_adds_up():
    _, record = searched(train, {"lr": LR}, trials=5, epochs=2, executor="fused", slots=3)
    took_s, apart_s = device_time_s(record)
    assert took_s < apart_s <= 3 * took_s + 1e-9
    assert sorted((each.number, each.epoch) for each in record.epochs) == [(n, e) for n in range(5) for e in (1, 2)]
    for each in record.epochs:
        assert each.end_s >= each.start_s
        others = [other for other in record.epochs if (other.slot, other.group) == (each.slot, each.group)]
        assert not any(each.start_s < other.start_s < each.end_s for other in others)


def test_a_folder_that_cannot_be_is_named_before_the_search(tmp_path):
    (tmp_path / "page").touch()
    with pytest.raises(FileExistsError, match="page"):
        hocket.tune(None, {"lr": LR}, report=tmp_path / "page")


def test_words_in_names_are_escaped(tmp_path):
    study, record = searched(train, {"lr": LR}, study=random_study(study_name="<b>"), trials=2, epochs=1)
    assert "&lt;b&gt;" in write_page(study, record, tmp_path).read_text()


def test_without_plotly_nothing_begins(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(MissingDependencyError, match=r"the report of hocket.tune needs plotly: pip install"):
        hocket.tune(None, {"lr": LR}, report=tmp_path)


WIDTHS = """(async () => {
  const drawn = () => document.querySelectorAll(".figure .main-svg").length > 3;
  while (!drawn() && performance.now() < 10000) await new Promise((done) => setTimeout(done, 50));
  const page = document.documentElement, inside = (each) => each.closest(".scroll, .figure");
  return {
    width: innerWidth, needed: page.scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
    drawn: drawn(),
    wide: [...document.querySelectorAll("main *")].map((each) => [each, each.getBoundingClientRect().right])
      .filter(([each, right]) => right > innerWidth + 1 && !inside(each)).map(([each]) => each.outerHTML.slice(0, 80)),
  };
})()"""


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    study, record = searched(train, SPACE, study=random_study(study_name="a search"), trials=6, epochs=2)
    return write_page(study, record, folder).read_text()


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_fits_both_backgrounds_and_a_telephone(html, width, dark, tmp_path):
    found, errors = visit(html, tmp_path, WIDTHS, width=width, dark=dark)
    assert not errors
    assert found["drawn"]
    assert found["paper"] == ("rgb(16, 19, 23)" if dark else "rgb(247, 246, 242)")
    assert found["needed"] <= found["width"] == width, found["wide"]
    assert not found["wide"]


@needs_chromium
@needs_axe
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(html, dark, tmp_path):
    found, errors = axe_finds(html, tmp_path, width=1280, dark=dark)
    assert not errors
    assert found == []
