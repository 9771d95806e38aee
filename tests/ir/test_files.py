"""Rules of every file format: its version, its keys, and that it is written whole or not at all."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from hocket.errors import FormatError
from hocket.ir import Costs, Graph, Machine, Op, Span, Timeline
from hocket.ir._fields import MAX_FILE_BYTES, named_failures, save_document

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


@each_noun
def test_missing_version_and_unknown_field(tmp_path, noun):
    path = tmp_path / "noun.json"
    path.write_text("{}")
    with pytest.raises(FormatError, match="format: missing"):
        type(NOUNS[noun]).load(path)
    NOUNS[noun].save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "extra": 1}))
    with pytest.raises(FormatError, match="unknown field 'extra'"):
        type(NOUNS[noun]).load(path)


@each_noun
def test_truncated_file_and_duplicate_key(tmp_path, noun):
    path = tmp_path / "noun.json"
    NOUNS[noun].save(path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(FormatError, match=r"noun\.json: not JSON"):
        type(NOUNS[noun]).load(path)
    path.write_text(text.replace('"format"', '"format": "x", "format"', 1))
    with pytest.raises(FormatError, match=r"noun\.json: .*'format' appears twice"):
        type(NOUNS[noun]).load(path)


@each_noun
@pytest.mark.parametrize("text", ["[]", "3", '"format"', "null"])
def test_not_an_object(tmp_path, noun, text):
    path = tmp_path / "noun.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="expected an object"):
        type(NOUNS[noun]).load(path)


HOSTILE = {
    "nested too deeply": b'{"format": ' + b"[" * 100_000,
    "nested too deeply ": b'{"a":' * 100_000,
    "at most 100 digits, got one of 401": b'{"format": ' + b"9" * 401 + b"}",
    "at most 100 digits, got one of 5001": b'{"format": -' + b"9" * 5000 + b"}",
    "surrogates not allowed": b'{"format": "\\ud800"}',
}


@each_noun
@pytest.mark.parametrize("expected", HOSTILE)
def test_hostile_json_is_one_clear_error(tmp_path, noun, expected):
    path = tmp_path / "noun.json"
    path.write_bytes(HOSTILE[expected])
    with pytest.raises(FormatError, match=f"noun.json: not JSON: .*{expected.strip()}"):
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


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "noun.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"noun\.json: not JSON"):
        Graph.load(path)


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
