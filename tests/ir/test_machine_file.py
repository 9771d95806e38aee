from __future__ import annotations

import json

import pytest
from hypothesis import given

from hocket.errors import FormatError, InputError
from hocket.ir import Device, Link, Machine
from strategies import any_machines


@given(machine=any_machines())
def test_round_trip(tmp_path_factory, machine):
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    machine.save(path)
    assert Machine.load(path) == machine


CPU = {"name": "cpu0", "cores": 4}
CARD = {"name": "n", "bytes_per_s": 1e6}
LINK = {"src": "a", "dst": "b", "bytes_per_s": 1e6}
PROBLEMS = {
    "devices: expected at least one device": {"devices": []},
    "missing field 'devices'": {},
    "devices[1].name: duplicate device name 'cpu0'": {"devices": [CPU, CPU]},
    "devices[0].name: expected a name": {"devices": [{"name": "cpu:0"}]},
    "devices[0].name: a device may not be named like a width": {"devices": [{"name": "4"}]},
    "devices[0].kind: expected cpu or cuda, got 'tpu'": {"devices": [{"name": "x", "kind": "tpu"}]},
    "devices[0].cores: expected a whole number >= 1, got 0": {"devices": [{"name": "x", "cores": 0}]},
    "devices[0].cores_per_cache: expected a whole number >= 1, got 0": {"devices": [{**CPU, "cores_per_cache": 0}]},
    "devices[0].cores: expected a whole number, got 2.5": {"devices": [{"name": "x", "cores": 2.5}]},
    "devices[0]: unknown field 'core'": {"devices": [{"name": "x", "core": 2}]},
    "devices[0].flops_per_s: expected a finite number > 0": {"devices": [{"name": "x", "flops_per_s": 0}]},
    "devices[0].cpus: expected one entry for each of 4 cores": {"devices": [{**CPU, "cpus": [[0]]}]},
    "links[0].bytes_per_s: expected a finite number > 0": {"devices": [CPU], "links": [{**LINK, "bytes_per_s": 0}]},
    "links[0].channels: expected a whole number >= 1, got 0": {"devices": [CPU], "links": [{**LINK, "channels": 0}]},
    "links[0].latency_us: expected a duration": {"devices": [CPU], "links": [{**LINK, "latency_us": -1}]},
    "cards[0].name: expected a name of its own, got ''": {"devices": [CPU], "cards": [{"name": "", "bytes_per_s": 1}]},
    "cards[1].name: expected a name of its own, got 'n'": {"devices": [CPU], "cards": [CARD, CARD]},
    "cards[0].bytes_per_s: expected a finite number > 0": {
        "devices": [CPU],
        "cards": [{"name": "n", "bytes_per_s": 0}],
    },
    "links[0].cards: names a missing card 'm'": {
        "devices": [CPU],
        "cards": [CARD],
        "links": [{**LINK, "cards": ["n", "m"]}],
    },
    "links[1]: duplicate link from 'a' to 'b'": {"devices": [CPU], "links": [LINK, LINK]},
    "links[0]: missing field 'dst'": {"devices": [CPU], "links": [{"src": "a", "bytes_per_s": 1}]},
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_bad_field_is_named_with_its_file(tmp_path, problem):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"format": "hocket-machine/1", **PROBLEMS[problem]}))
    with pytest.raises(FormatError) as caught:
        Machine.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


def test_a_link_without_channels_never_queues(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"format": "hocket-machine/1", "devices": [CPU], "links": [{**LINK, "channels": None}]}))
    assert Machine.load(path).link("a", "b").channels is None


def test_link_duration_and_missing_link():
    machine = Machine((Device("cpu0"),), (Link("a", "b", 1e6, latency_us=50.0),))
    assert machine.link("a", "b").duration_us(1000.0) == 1050.0
    with pytest.raises(InputError, match="no link from 'b' to 'a'"):
        machine.link("b", "a")


def test_of_and_here():
    assert Machine.of(cores=68, smt=4).cores == 68
    with pytest.raises(InputError, match="speed"):
        Machine.of(cores=2, speed=3.0)
    with pytest.raises(FormatError, match="cores"):
        Machine.of(cores=0)
    for field in ({"cores": 10**12}, {"cores": 2, "smt": 10**9}, {"cores": 2, "cores_per_cache": 10**6}):
        with pytest.raises(FormatError, match=f"{list(field)[-1]}: expected at least 1 and at most"):
            Machine.of(**field)
    here = Machine.here()
    assert here.cores == len(here.devices[0].cpus)


@pytest.mark.parametrize("name", ["p100", "v100", "a100", "h200"])
def test_machines_that_come_with_hocket_name_their_sources(name):
    machine = Machine.preset(name)
    (gpu,) = machine.devices
    assert (gpu.name, gpu.kind) == ("gpu0", "cuda")
    assert None not in (gpu.flops_per_s, gpu.bytes_per_s, gpu.memory_bytes)
    assert gpu.launch_us > gpu.graph_launch_us > 0
    for word in ("Multiprocessors: ", "priorities: ", "launch_us: ", "graph_launch_us: ", "event_us: "):
        assert word in machine.note.replace("All but the rest: ", "Multiprocessors: ")


def test_a_machine_that_nobody_knows():
    with pytest.raises(InputError, match="expected one of a100, h100, h200, p100, v100, got 'k20'"):
        Machine.preset("k20")
