from __future__ import annotations

import json

import torch

from benchmarks.cli import main
from benchmarks.loading import CONTENDERS, NETWORKS, PacedReader, PacedStream, searched_names
from hocket.loading import first_use, open_weights
from hocket.loading.targets import named_tensors
from loading.files import stored


def test_every_contender_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    words = ("bert-tiny", "--rounds", "1", "--batch-size", "1", "--gbit", "10", "-o", "loading.json")
    assert main(["loading", *words]) == 0
    result = json.loads((tmp_path / "loading.json").read_text())
    found = result["models"]["bert-tiny"]
    assert result["complete"]
    assert found["over_link"].keys() == set(CONTENDERS)
    assert all(row["same_bits"] for row in found["over_link"].values())
    assert all(found["warm_disk"]["output"][name]["same_bits"] for name in ("load_file", "hocket"))
    assert main(["loading", "bert-huge"]) == 2
    assert main(["loading", "--gbit", "0"]) == 2


def test_paced_readers_hand_out_what_they_have():
    data = stored({"a": torch.ones(300)})
    reader, stream = PacedReader(data, 1e12), PacedStream(data, 1e12)
    assert bytes(reader.read_at(3, 5)) == data[3:8]
    assert stream.read(10) == data[:10]
    weights = open_weights(PacedStream(data, 1e12))
    assert weights.is_sequential
    assert weights.tensors["a"].entry.size_bytes == 1200


def test_the_searched_order_has_every_tensor_once_and_a_chain_by_first_use():
    network = NETWORKS["bert-tiny"](1)
    order = searched_names(network)
    assert sorted(order) == sorted(named_tensors(network.model))
    used = first_use(network.model, *network.args, **network.kwargs)
    layers = [name.split(".")[3] for name in order if ".layer." in name]
    assert layers == sorted(layers)
    assert [name.split(".")[3] for name in used if ".layer." in name] == layers
