import json

import pytest

from hocket.errors import FormatError
from hocket.ir import Device, Link, Machine
from support.refusals import fails, refused

CPU = {"name": "cpu0", "cores": 4}
LINK = {"src": "a", "dst": "b", "bytes_per_s": 1e6}


def test_a_link_without_channels_never_queues(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"format": "hocket-machine/1", "devices": [CPU], "links": [{**LINK, "channels": None}]}))
    assert Machine.load(path).link("a", "b").channels is None


def test_link_duration_and_missing_link():
    machine = Machine((Device("cpu0"),), (Link("a", "b", 1e6, latency_us=50.0),))
    assert machine.link("a", "b").duration_us(1000.0) == 1050.0
    refused("no link from 'b' to 'a'", machine.link, "b", "a")


def test_of_and_here():
    assert Machine.of(cores=68, smt=4).cores == 68
    refused("speed", Machine.of, cores=2, speed=3.0)
    fails(FormatError, "cores", Machine.of, cores=0)
    for field in ({"cores": 10**12}, {"cores": 2, "smt": 10**9}, {"cores": 2, "cores_per_cache": 10**6}):
        fails(FormatError, f"{list(field)[-1]}: expected at least 1 and at most", Machine.of, **field)
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
    refused("expected one of a100, h100, h200, p100, v100, got 'k20'", Machine.preset, "k20")
