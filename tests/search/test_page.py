"""The page on a search: whole, offline, and of what the search did."""

from __future__ import annotations

import sys

import pytest
from tests.search.pieces import LR, SPACE, random_study, searched, train

import hocket
from hocket.errors import MissingDependencyError
from hocket.search.page import device_time_s, write_page


def test_the_page_shows_slots_values_and_parameters(tmp_path):
    study = hocket.tune(train, SPACE, 6, 3, study=random_study(), halving=hocket.Halving(), report=tmp_path / "page")
    [path] = (tmp_path / "page").iterdir()
    text = path.read_text()
    assert path.name == "index.html"
    assert "6 trials: " in text
    assert "fusible: lr, step; infusible: width" in text
    for number in range(6):
        assert f"trial {number}, epoch 1" in text
    assert "What ran with what, and when" in text
    assert "Parameters and values" in text
    assert "Best value so far" in text
    best = text[text.index("<table>") : text.index("</table>")]
    assert f"<th scope='row'>{study.best_trial.number}</th><td>{study.best_value:.6g}</td>" in best
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


def test_words_in_names_are_escaped(tmp_path):
    study, record = searched(train, {"lr": LR}, study=random_study(study_name="<b>"), trials=2, epochs=1)
    assert "&lt;b&gt;" in write_page(study, record, tmp_path).read_text()


def test_without_plotly_nothing_begins(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(MissingDependencyError, match=r"the report of hocket.tune needs plotly: pip install"):
        hocket.tune(None, {"lr": LR}, report=tmp_path)
