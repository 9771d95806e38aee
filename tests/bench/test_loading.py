import json

from benchmarks import loading
from benchmarks.cli import main
from benchmarks.loading import CONTENDERS


def test_every_contender_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setattr(loading, "GBIT", 10.0)
    assert main(["loading", "bert-tiny", "--rounds", "1", "-o", "loading.json"]) == 0
    result = json.loads((tmp_path / "loading.json").read_text())
    found = result["models"]["bert-tiny"]
    assert result["complete"]
    assert found["over_link"].keys() == set(CONTENDERS)
    assert all(row["same_bits"] for row in found["over_link"].values())
    assert all(found["warm_disk"]["output"][name]["same_bits"] for name in ("load_file", "hocket"))
    assert main(["loading", "bert-huge"]) == 2
