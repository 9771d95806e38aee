"""hocket explain: whether a step can be planned, and every obstacle with the user's line and a cure."""

import pytest
import torch

from .conftest import TINY

COUNTING = """
import torch
import hocket

def job():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {}
    state = {"n": 0}

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        BETWEEN
        loss.backward()
        optimizer.step()
        state["n"] += 1
        BODY
        return loss.detach()

    return hocket.Job(step, model, optimizer, [torch.randn(3, 4) for _ in range(3)], name="counting")
"""


@pytest.fixture
def target(tmp_path):
    def written(body, between="pass"):
        path = tmp_path / "train.py"
        path.write_text(COUNTING.replace("BODY", body).replace("BETWEEN", between))
        return f"{path}:job"

    return written


def test_a_step_of_the_zoo_is_one_graph(hocket):
    found = hocket("explain", *TINY).fine()
    assert found.out.splitlines()[0] == "mlp: one graph"
    assert "forward" in found.out
    assert found.err == ""


def test_what_the_step_writes_is_named(hocket, target):
    found = hocket("explain", target("pass"), "--format", "json").json
    assert found["verdict"] == "one graph"
    assert found["ops"] == sum(found["roles"].values()) > 5
    assert any("'n'" in name for name in found["written"])
    assert found["obstacles"] == []


def test_every_obstacle_has_its_line_and_a_cure(hocket, target):
    body = "loss = loss + [seen.update({len(seen): object()}), open('/dev/null').close(), int(loss.sum())][-1]"
    found = hocket("explain", target("pass", body), "--format", "json").json
    assert found["verdict"] == "regions"
    assert len(found["obstacles"]) >= 3
    for obstacle in found["obstacles"]:
        assert obstacle["reason"]
        assert obstacle["cure"]
        assert "train.py:14" in obstacle["line"], obstacle
    text = hocket("explain", target("pass", body)).out
    assert text.startswith("counting: regions")
    assert "its Python runs as it is, its models and updates by plan" in text
    assert text.count("cure: ") == len(found["obstacles"])


def test_the_line_of_a_file_whose_name_has_spaces(hocket, target, tmp_path):
    target("pass", "loss = loss + len(list(__import__('pathlib').Path('/').glob('x')))")
    file = (tmp_path / "train.py").rename(tmp_path / "my first train.py")
    obstacle = hocket("explain", f"{file}:job", "--format", "json").json["obstacles"][0]
    assert obstacle["line"] == "my first train.py:14"


def test_what_is_written_is_short_and_shows_no_escape_sequence(hocket, target):
    between = "[state.update({f'\\x1b[31m{i}': state.get(f'\\x1b[31m{i}', 0) + 1}) for i in range(30)]"
    words = ("explain", target("pass", between))
    assert len(hocket(*words, "--format", "json").json["written"]) == 31
    out = hocket(*words).out
    assert "and 23 more" in out
    assert "\x1b" not in out


def test_a_mode_around_the_step_is_named(hocket, target):
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        out = hocket("explain", target("pass")).out
    assert "1. torch.autograd looks for anomalies" in out
    assert "cure: leave it before the step is called" in out


def test_draws_are_no_place_of_the_users(hocket, target):
    found = hocket("explain", target("pass", "loss = loss * __import__('random').random()"), "--format", "json").json
    assert found["verdict"] == "one graph"
    assert [name for name in found["written"] if "'n'" not in name] == []


def test_a_generator_that_is_advanced_has_a_cure(hocket, target):
    between = "seen.setdefault('it', (k for k in iter(int, 1))); next(seen['it'])"
    found = hocket("explain", target("pass", between)).out
    assert "the step fetches from closure of step: seen['it']\n   cure: fetch before its first op" in found


def test_python_after_the_ops_is_no_obstacle(hocket, target):
    body = "print(f'{loss.item():.1f}'); seen['best'] = min(seen.get('best', 9.0), loss.item())"
    found = hocket("explain", target(body), "--format", "json").json
    assert found["verdict"] == "one graph"
    assert found["obstacles"] == []
    assert found["python"].startswith("train.py:")
    assert "18" in found["python"]
    assert "run as Python" in hocket("explain", target(body)).out


def test_a_step_that_raises_is_blamed(hocket, target):
    found = hocket("explain", target("raise KeyError('x')"))
    assert found.status == 1
    assert "train.py" in found.err


def test_a_list_that_outlives_the_step_may_be_returned(hocket, tmp_path):
    text = COUNTING.replace("BETWEEN", "pass").replace("BODY", "return loss.detach(), seen")
    (tmp_path / "train.py").write_text(text.replace("seen = {}", "seen = [object()]"))
    found = hocket("explain", f"{tmp_path / 'train.py'}:job", "--format", "json").json
    assert found["verdict"] == "one graph"
    assert found["python"] == ""
