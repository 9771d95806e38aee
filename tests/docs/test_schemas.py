"""Files that Hocket writes fit the schemas of docs, and a field that no reader knows does not."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hocket.cli import main

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a document of each format, as commands write them."""
    folder, cache = tmp_path_factory.mktemp("report"), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        assert main(["run", "mlp", "--set", "depth=2", "--runs", "3", "--report", str(folder)]) == 0
    assert main(["machine", "-o", str(folder / "machine.json")]) == 0
    files = {
        "graph": folder / "graph.json",
        "costs": folder / "costs.json",
        "machine": folder / "machine.json",
        "timeline": folder / "timeline-serial.json",
        "comparison": folder / "comparison.json",
        "decision": next(cache.rglob("decisions/*.json")),
    }
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items()}


@pytest.mark.parametrize("name", sorted(path.stem for path in SCHEMAS.glob("*.json")))
def test_what_is_written_fits(name: str, written: dict[str, Any]) -> None:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    checker = jsonschema.Draft202012Validator(schema)
    checker.validate(written[name])
    assert not checker.is_valid({**written[name], "format": "hocket-other/1"})
    assert name == "comparison" or not checker.is_valid({**written[name], "unknown": 1})
