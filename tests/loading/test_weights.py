from __future__ import annotations

import io
import json
import os

import pytest
import torch

from hocket.errors import FormatError, InputError
from hocket.loading import open_weights
from loading.files import Memory, OneWay, stored

FIRST, SECOND = stored({"a": torch.ones(2), "b": torch.zeros(3)}), stored({"c": torch.ones(1)})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.safetensors").write_bytes(FIRST)
    (tmp_path / "two.safetensors").write_bytes(SECOND)
    return tmp_path


def index(folder, weight_map, name="model.safetensors.index.json"):
    path = folder / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


RIGHT = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}


def test_an_index_a_folder_and_a_list_open_all_files(folder):
    path = index(folder, RIGHT)
    for file in (path, str(path), folder, [folder / "one.safetensors", io.BytesIO(SECOND)]):
        weights = open_weights(file)
        assert sorted(weights.tensors) == ["a", "b", "c"]
        assert weights.size_bytes == 24
        weights.close()


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({**RIGHT, "d": "one.safetensors"}, "weight_map: d: one.safetensors has no such tensor"),
        ({**RIGHT, "c": "one.safetensors", "a": "two.safetensors"}, "weight_map: a: two.safetensors has no such"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "'b' of .*one.safetensors is missing"),
        ({"a": "../one.safetensors"}, "expected a file beside the index"),
        ({"a": "/etc/passwd"}, "expected a file beside the index"),
        ({"a": 1}, "expected a file beside the index"),
        ({}, "expected an object with a file's name"),
    ],
)
def test_an_index_that_is_wrong_is_named(folder, weight_map, words):
    with pytest.raises(FormatError, match=words):
        open_weights(index(folder, weight_map))


def test_an_index_that_is_no_json_is_named(folder):
    (folder / "index.json").write_text("{")
    with pytest.raises(FormatError, match=r"index.json: not JSON"):
        open_weights(folder / "index.json")


def test_what_is_no_file_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match=r"tensor 'a' is in .* and in"):
        open_weights([folder / "one.safetensors", io.BytesIO(FIRST)])
    with pytest.raises(InputError, match="at least one file"):
        open_weights([])
    with pytest.raises(InputError, match="got int"):
        open_weights(3)
    with pytest.raises(InputError, match="open as text"):
        open_weights(io.StringIO("{}"))
    with pytest.raises(InputError, match=r"neither model.safetensors.index.json nor"):
        open_weights(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_weights(tmp_path / "none.safetensors")


def test_a_file_object_is_read_from_where_it_stands():
    file = io.BytesIO(b"before" + FIRST)
    file.seek(6)
    weights = open_weights(file)
    stored_b = weights.tensors["b"]
    stored_b.source.fill(stored_b.entry.offset, [memoryview(found := bytearray(12))])
    assert bytes(found) == bytes(12)
    assert not weights.is_sequential


def test_a_stream_goes_forward_only():
    weights = open_weights(OneWay(FIRST, step=3))
    assert weights.is_sequential
    first, last = sorted(weights.tensors.values(), key=lambda one: one.place)
    last.source.fill(last.entry.offset, [memoryview(found := bytearray(last.entry.size_bytes))])
    assert bytes(found) == FIRST[last.entry.offset :]
    with pytest.raises(InputError, match="cannot go back"):
        first.source.fill(first.entry.offset, [memoryview(bytearray(4))])


def test_a_stream_that_ends_is_truncated():
    with pytest.raises(FormatError, match=r"pipe: byte 9: truncated: \d+ more bytes"):
        open_weights(OneWay(FIRST[:9]))


def test_a_reader_may_return_less_and_not_more():
    class Slow(Memory):
        def read_at(self, offset, length):
            return super().read_at(offset, min(length, 5))

    class Generous(Memory):
        def read_at(self, offset, length):
            return super().read_at(offset, length + 1)

    assert open_weights(Slow(FIRST)).tensors.keys() == {"a", "b"}
    with pytest.raises(InputError, match=r"read_at\(0, 8\) returned 9 bytes"):
        open_weights(Generous(FIRST))
    short = Memory(FIRST)
    short.size = "many"
    with pytest.raises(InputError, match="size: expected a whole number"):
        open_weights(short)


class ReadsOnly:
    """A file object that gives anything."""

    name = "object"

    def __init__(self, found):
        self.found = found

    def read(self, length):
        return self.found


@pytest.mark.parametrize(("found", "kind"), [(None, "NoneType"), ("text", "str"), ([1], "list")])
def test_what_a_reader_gives_is_bytes(found, kind):
    class Gives(Memory):
        def read_at(self, offset, length):
            return found

    with pytest.raises(InputError, match=rf"memory: read_at\(0, 8\): expected bytes, got {kind}"):
        open_weights(Gives(FIRST))
    if found is not None:
        with pytest.raises(InputError, match=rf"object: read\(8\): expected bytes, got {kind}"):
            open_weights(ReadsOnly(found))


class OfBytes:
    """A path that is bytes to the system."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


def test_a_path_may_be_bytes(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(FIRST)
    name = os.fsencode(path)
    for file in (name, OfBytes(name), [name], os.fsencode(tmp_path)):
        weights = open_weights(file)
        assert weights.tensors.keys() == {"a", "b"}
        assert weights.sources[0].name == str(path)
        weights.close()
    for wrong in (bytearray(name), memoryview(name), [bytearray(name)]):
        kind = type(wrong[0] if isinstance(wrong, list) else wrong).__name__
        with pytest.raises(InputError, match=f"load: expected a path, .* got {kind}"):
            open_weights(wrong)
