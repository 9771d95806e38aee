"""The first example of docs/tune.md runs, and the command line runs a search."""

import json
import re
from pathlib import Path

import pytest

from hocket.cli import main

DOCS = Path(__file__).parents[2] / "docs" / "tune.md"


def example():
    return re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]


def test_the_example_runs(capsys):
    found = {}
    exec(example(), found)
    assert str(found["study"].best_value) in capsys.readouterr().out
    assert found["study"].best_value < 1.2  # guessing has ln 4
    assert {trial.state.name for trial in found["study"].trials} == {"COMPLETE", "PRUNED"}


def test_the_command_runs_the_search_of_a_file(tmp_path, capsys):
    lines = [line for line in example().splitlines() if not line.startswith("print(")]
    last = next(number for number, line in enumerate(lines) if line.startswith("study = "))
    lines[last] = "def study():\n    return hocket.tune(train, space, trials=4, epochs=2)"
    file = tmp_path / "digits_search.py"
    file.write_text("\n".join(lines))
    assert main(["tune", f"{file}:study", "--format", "json", "--top", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] == {"complete": 4}
    assert len(found["best"]) == 2
    assert found["best"][0]["value"] <= found["best"][1]["value"]
    assert main(["tune", f"{file}:study", "--top", "2"]) == 0
    assert "4 trials, 4 complete" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution")
def test_values_and_categories_that_json_does_not_have_are_text(tmp_path, capsys):
    file = tmp_path / "digits_search.py"
    file.write_text(
        "import optuna\n"
        "def study():\n"
        "    made = optuna.create_study()\n"
        "    choices = {'kind': optuna.distributions.CategoricalDistribution([dict, (1, 2)])}\n"
        "    for value, kind in ((float('inf'), dict), (0.5, (1, 2))):\n"
        "        made.add_trial(optuna.trial.create_trial(value=value, params={'kind': kind}, distributions=choices))\n"
        "    return made\n"
    )
    assert main(["tune", f"{file}:study", "--format", "json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert [trial["value"] for trial in best] == [0.5, "inf"]
    assert [trial["params"]["kind"] for trial in best] == [[1, 2], "<class 'dict'>"]
    assert main(["tune", f"{file}:study"]) == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("mlp", 2, "mlp: expected file.py:function"),
        ("{}:nothing", 2, "has no function 'nothing'"),
        ("{}:several", 2, "several: expected a study of one direction, got 2"),
        ("{}:other", 1, "expected it to return the study of hocket.tune(...), got None"),
    ],
)
def test_other_targets_are_named(words, status, message, tmp_path, capsys):
    file = tmp_path / "digits_search.py"
    file.write_text(
        "import optuna\n"
        "def other():\n    return None\n"
        "def several():\n    return optuna.create_study(directions=['minimize', 'maximize'])\n"
    )
    assert main(["tune", words.format(file)]) == status
    assert message in capsys.readouterr().err
