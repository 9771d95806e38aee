"""Rules of every file format: its version, its keys, and that it is written whole or not at all."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import FormatError
from hocket.ir import Costs, Graph, Machine, Op, Span, Timeline
from hocket.ir._fields import MAX_FILE_BYTES, named_failures, save_document
from strategies import any_costs, any_graphs, any_machines, any_timelines
from support.refusals import fails

NOUNS = {
    "graph": Graph((Op("a"),)),
    "costs": Costs({"a": {"1": 2.0}}),
    "machine": Machine.of(cores=2),
    "timeline": Timeline((Span("a", "main", 0.0, 1.0),), ("main",)),
}
each_noun = pytest.mark.parametrize("noun", NOUNS)


@each_noun
def test_first_key_is_the_version(tmp_path, noun):
    path = tmp_path / "noun.json"
    NOUNS[noun].save(path)
    assert next(iter(json.loads(path.read_text()).items())) == ("format", f"hocket-{noun}/1")
    assert list(tmp_path.iterdir()) == [path]


@each_noun
@pytest.mark.parametrize("version", ["hocket-NOUN/2", "hocket-plan/1", 1, None])
def test_unknown_version(tmp_path, noun, version):
    path = tmp_path / "noun.json"
    NOUNS[noun].save(path)
    document = json.loads(path.read_text())
    document["format"] = version.replace("NOUN", noun) if isinstance(version, str) else version
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=f'format: expected "hocket-{noun}/1"') as caught:
        type(NOUNS[noun]).load(path)
    assert str(path) in str(caught.value)


BROKEN = [
    ("format: missing", lambda text: "{}"),
    ("unknown field 'extra'", lambda text: json.dumps({**json.loads(text), "extra": 1})),
    ("not JSON", lambda text: text[: len(text) // 2]),
    (".*'format' appears twice", lambda text: text.replace('"format"', '"format": "x", "format"', 1)),
    *(("expected an object", lambda text, other=other: other) for other in ("[]", "3", '"format"', "null")),
    ("not JSON: .*nested too deeply", lambda text: '{"format": ' + "[" * 100_000),
    ("not JSON: .*nested too deeply", lambda text: '{"a":' * 100_000),
    ("not JSON: .*at most 100 digits, got one of 401", lambda text: '{"format": ' + "9" * 401 + "}"),
    ("not JSON: .*at most 100 digits, got one of 5001", lambda text: '{"format": -' + "9" * 5000 + "}"),
    ("not JSON: .*surrogates not allowed", lambda text: r'{"format": "\ud800"}'),
]


@each_noun
@pytest.mark.parametrize(("expected", "broken"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_one_clear_error(tmp_path, noun, expected, broken):
    path = tmp_path / "noun.json"
    NOUNS[noun].save(path)
    path.write_text(broken(path.read_text()))
    with pytest.raises(FormatError, match=rf"noun\.json: .*{expected}"):
        type(NOUNS[noun]).load(path)


@each_noun
def test_a_number_that_no_float_holds_is_refused_in_every_field(tmp_path, noun):
    path = tmp_path / "noun.json"
    NOUNS[noun].save(path)
    text = path.read_text()
    places = [match.span() for match in re.finditer(r"\b\d+(\.\d+)?\b(?=[,\s])", text)]
    for begin, end in places:
        path.write_text(text[:begin] + "9" * 99 + "e300" + text[end:])
        with pytest.raises(FormatError, match=r"noun\.json: "):
            type(NOUNS[noun]).load(path)


@each_noun
def test_only_regular_files_of_bounded_size_are_read(tmp_path, noun):
    pipe, link, large = (tmp_path / name for name in ("pipe", "link", "large"))
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    for path, expected in ((pipe, "regular file"), (link, "regular file"), (large, "expected at most 67108864 bytes")):
        with pytest.raises(FormatError, match=expected):
            type(NOUNS[noun]).load(path)


GIVEN = {"graph": any_graphs(), "costs": any_costs(), "machine": any_machines(), "timeline": any_timelines()}


@each_noun
@given(data=st.data())
def test_round_trip(tmp_path_factory, noun, data):
    value, path = data.draw(GIVEN[noun]), tmp_path_factory.mktemp(noun) / "noun.json"
    value.save(path)
    assert type(value).load(path) == value


def span(op="a", lane="main", start_us=0.0, end_us=1.0):
    return {"op": op, "lane": lane, "start_us": start_us, "end_us": end_us}


CPU = {"name": "cpu0", "cores": 4}
CARD = {"name": "n", "bytes_per_s": 1e6}
LINK = {"src": "a", "dst": "b", "bytes_per_s": 1e6}
ABCD = [*({"name": name} for name in "abc"), {"name": "d", "reads": ["y"]}]
# Faults of a file, by the words of the error. For costs, ops and spans the table has the field only.
COSTS = {
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got -2": {"a": {"1": -2}},
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got nan": {"a": {"1": math.nan}},
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got 'x'": {"a": {"1": "x"}},
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got True": {"a": {"1": True}},
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got 1e+300": {"a": {"1": 1e300}},
    "durations_us['a']: expected at least one width or device": {"a": {}},
    "durations_us['a']: expected a width >= 1 or a device name, got '0'": {"a": {"0": 1.0}},
    "durations_us['a']: expected a width >= 1 or a device name, got 'cpu0:0'": {"a": {"cpu0:0": 1.0}},
    "durations_us['a']: expected a width >= 1 or a device name, got ':2'": {"a": {":2": 1.0}},
    "durations_us['a']: expected an object": {"a": 3.0},
}
OPS = {
    "duplicate op name 'a'": [{"name": "a"}, {"name": "a"}],
    "unknown role 'foreward'": [{"name": "a", "role": "foreward"}],
    "unknown field 'flop'": [{"name": "a", "flop": 3}],
    "missing field 'name'": [{"target": "aten.mm"}],
    "ops[0].flops: expected a finite number >= 0, got -1": [{"name": "a", "flops": -1}],
    "ops[0].bytes: expected a finite number >= 0, got nan": [{"name": "a", "bytes": math.nan}],
    "ops[0].bytes: expected a number, got True": [{"name": "a", "bytes": True}],
    "ops[0].stateless: expected true or false": [{"name": "a", "stateless": 1}],
    "ops[0].name: expected a name without white space, got 'a b'": [{"name": "a b"}],
    "ops[1]: expected an object, got the string 'b'": [{"name": "a"}, "b"],
    "ops[0].writes: expected a list, got the string 'x'": [{"name": "a", "writes": "x"}],
}
EDGES = {
    "'a' -> 'z' names a missing op 'z'": {"edges": [["a", "z", 1]]},
    "carried[0]: 'z' -> 'a' names a missing op 'z'": {"carried": [["z", "a"]]},
    "edges[0][2]: expected a finite number >= 0, got -4": {"edges": [["a", "b", -4]]},
    "edges[0]: expected [src, dst, bytes], got 1 elements": {"edges": [["a"]]},
    "carried[0]: expected 2 elements, got 3": {"carried": [["a", "b", 1]]},
    "edges: expected a list, got an object": {"edges": {}},
    "unknown field 'edge'": {"edge": []},
    "together[1]: names a missing op 'z'": {"together": [["a", "b"], ["a", "z"]]},
    "together[0][1]: expected a string, got 3": {"together": [["a", 3]]},
    "buffers[0].bytes: expected a finite number >= 0, got -1": {"buffers": [{"name": "x", "bytes": -1}]},
    "buffers[1].name: expected a name of its own, got 'x'": {"buffers": [{"name": "x"}, {"name": "x"}]},
    "buffer 'x': expected one of step, kept, lasting, input, got 'long'": {"buffers": [{"name": "x", "life": "long"}]},
    "buffers[0]: unknown field 'size'": {"buffers": [{"name": "x", "size": 1}]},
    "ops[3].reads: op 'd' reads a missing buffer 'y'": {"buffers": [{"name": "x"}]},
}
MACHINES = {
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
SPANS = {
    "op 'a': expected 0 <= start_us <= end_us, got 2.0 and 1.0": [span(start_us=2.0)],
    "spans[0].start_us: expected a duration in microseconds, from 0 to 1e+24, got -1.0": [span(start_us=-1.0)],
    "spans[0].end_us: expected a duration in microseconds, from 0 to 1e+24, got nan": [span(end_us=math.nan)],
    "spans[0].end_us: expected a duration in microseconds, from 0 to 1e+24, got 1.7e+308": [span(end_us=1.7e308)],
    "op 'a' ran on lane 'side', which is not listed": [span(lane="side")],
    "ops 'a' and 'b' overlap on lane 'main'": [span("b", start_us=0.5, end_us=2.0), span("a")],
    "spans[1]: missing field 'op'": [span(), {"lane": "main"}],
    "spans[0]: unknown field 'stop_us'": [{**span(), "stop_us": 3.0}],
}
PROBLEMS = [
    *(("costs", {"durations_us": rows}, problem) for problem, rows in COSTS.items()),
    ("costs", {"durations_us": {"a": {"1": 1}}, "sources": {"a": "guessed"}}, "sources['a']: expected"),
    ("costs", {"durations_us": {}, "placement": "near"}, "placement: expected compact or scatter, got 'near'"),
    ("costs", {}, "missing field 'durations_us'"),
    *(("graph", {"ops": ops}, problem) for problem, ops in OPS.items()),
    *(("graph", {"ops": ABCD, **fields}, problem) for problem, fields in EDGES.items()),
    *(("machine", fields, problem) for problem, fields in MACHINES.items()),
    *(("timeline", {"lanes": ["main"], "spans": spans}, problem) for problem, spans in SPANS.items()),
]


@pytest.mark.parametrize(("noun", "fields", "problem"), PROBLEMS)
def test_a_bad_field_is_named_with_its_file(tmp_path, noun, fields, problem):
    path = tmp_path / "noun.json"
    path.write_text(json.dumps({"format": f"hocket-{noun}/1", **fields}))
    with pytest.raises(FormatError) as caught:
        type(NOUNS[noun]).load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "noun.json"
    path.write_bytes(b"\xff\xfe\x00")
    fails(FormatError, r"noun\.json: not JSON", Graph.load, path)


@each_noun
def test_missing_file_is_no_format_error(tmp_path, noun):
    with pytest.raises(FileNotFoundError):
        type(NOUNS[noun]).load(tmp_path / "nothing.json")


def test_failed_save_leaves_nothing_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "noun.json"
    with pytest.raises(ValueError, match="Out of range"):
        save_document(path, {"format": "x", "values": [1.0, float("nan")]})
    assert not list(tmp_path.iterdir())
    NOUNS["graph"].save(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        save_document(path, {"format": "x", "values": [1.0, object()]})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_save_into_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        NOUNS["graph"].save(tmp_path / "missing" / "graph.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device without room")
@pytest.mark.parametrize("write", [lambda file: file.write(b"x"), lambda file: torch.save([torch.zeros(9999)], file)])
def test_a_file_for_which_there_is_no_room_is_named(write):
    with (
        pytest.raises(OSError, match=r"No space left on device: 'state\.pt'"),
        named_failures("state.pt"),
        open("/dev/full", "wb") as file,
    ):
        write(file)


def test_a_folder_that_takes_no_file_is_an_error_with_the_name_that_was_asked_for():
    with pytest.raises(OSError, match=r"'/proc/graph\.json'"):
        NOUNS["graph"].save("/proc/graph.json")
