"""Weights of files: what opens, what is read, and what is refused by name."""

import io
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as reference_load

from hocket.errors import FormatError
from hocket.loading import open_weights
from loading.files import Memory, OneWay, raw, stored
from support.refusals import fails, refused

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
    for file in (path, str(path), folder, [folder / "one.safetensors", io.BytesIO(SECOND)], [folder]):
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
    fails(FormatError, r"index.json: not JSON", open_weights, folder / "index.json")


def test_what_is_no_file_is_refused(folder, tmp_path):
    refused(r"tensor 'a' is in .* and in", open_weights, [folder / "one.safetensors", io.BytesIO(FIRST)])
    refused("at least one file", open_weights, [])
    refused("got int", open_weights, 3)
    refused("open as text", open_weights, io.StringIO("{}"))
    refused(r"neither model.safetensors.index.json nor", open_weights, tmp_path)
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
    refused("cannot go back", first.source.fill, first.entry.offset, [memoryview(bytearray(4))])


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
    refused(r"read_at\(0, 8\) returned 9 bytes", open_weights, Generous(FIRST))
    short = Memory(FIRST)
    short.size = "many"
    refused("size: expected a whole number", open_weights, short)


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

    refused(rf"memory: read_at\(0, 8\): expected bytes, got {kind}", open_weights, Gives(FIRST))
    if found is not None:
        refused(rf"object: read\(8\): expected bytes, got {kind}", open_weights, ReadsOnly(found))


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
        refused(f"load: expected a path, .* got {kind}", open_weights, wrong)


def opened(data):
    return open_weights(io.BytesIO(data))


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(SHAPES, DTYPES), max_size=5))
def test_what_safetensors_writes_is_read_as_it_was(tensors):
    made = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in tensors.items() if name != "__metadata__"}
    data = stored(made)
    found = opened(data).tensors
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        part = data[found[name].entry.offset : found[name].entry.end]
        assert part == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found[name].entry.shape == tuple(tensor.shape)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "expected a safetensors file, got 0 bytes"),
        (b"\x01\0\0", "got 3 bytes"),
        (b"PK\x03\x04 a zip file", "first 8 bytes are a length.*read a checkpoint of torch.save by torch.load"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "first 8 bytes are a length"),
        ((1000).to_bytes(8, "little") + b"{}", "header: truncated"),
        (raw(b"{nothing"), "header: not JSON"),
        (raw(b'"\xff\xff"'), "header: not JSON"),
        (raw(b"[" * 50_000 + b"]" * 50_000), "header: not JSON"),
        (raw([1, 2]), "expected an object, got list"),
        (raw({"__metadata__": {"a": 1}}), "__metadata__: expected an object of strings"),
        (raw(b'{"a": {}, "a": {}}'), "'a' appears twice"),
        (
            raw(b'{"a": {"shape": [' + b"9" * 5000 + b"]}}"),
            "header: not JSON: expected whole numbers of at most 100 digits",
        ),
        (raw({"a": entry(shape=(10**18,) * 64)}, bytes(8)), "a: F32 of shape"),
        (raw({"a": entry(shape=(2**63,))}, bytes(8)), "a: expected a shape"),
        (raw(b'{"\\ud800": {}}'), "header: not JSON"),
        (raw({"a": {"dtype": "F32"}}), "a: expected dtype, shape and data_offsets"),
        (raw({"a": entry(more=1)}, bytes(8)), "a: expected dtype, shape and data_offsets, and nothing else"),
        (raw({"a": entry(dtype="F33")}, bytes(8)), "a: expected a dtype of BOOL"),
        (raw({"a": entry(dtype=["F32"])}, bytes(8)), "a: expected a dtype of BOOL"),
        (raw({"a": entry(shape=(-2, -1))}, bytes(8)), "a: expected a shape"),
        (raw({"a": entry(shape=(2.0,))}, bytes(8)), "a: expected a shape"),
        (raw({"a": entry(shape=(True, 2))}, bytes(8)), "a: expected a shape"),
        (raw({"a": entry(offsets=(8, 0))}, bytes(8)), "a: expected data_offsets"),
        (raw({"a": entry(offsets=(0, 8, 16))}, bytes(8)), "a: expected data_offsets"),
        (raw({"a": entry(shape=(1 << 40, 1 << 40))}, bytes(8)), "a: F32 of shape"),
        (raw({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "b: overlaps 'a'"),
        (raw({"a": entry(), "b": entry()}, bytes(8)), "b: overlaps 'a'"),
        (raw({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "b: leaves a hole after 'a'"),
        (raw({"a": entry(offsets=(4, 12))}, bytes(12)), "a: leaves a hole after the header"),
        (raw({"a": entry()}, bytes(7)), "a: truncated"),
        (raw({"a": entry()}, bytes(9)), "a: too long"),
    ],
)
def test_a_file_that_cannot_be_right_is_named(data, words):
    fails(FormatError, words.replace("[", r"\["), opened, data)
    # A file that the reference takes is never refused here, except for repeated names and further keys.
    if "twice" not in words and "nothing else" not in words:
        with pytest.raises((SafetensorError, KeyError, ValueError, OverflowError)):
            reference_load(data)


def test_a_header_of_many_names_is_refused_as_fast_as_it_is_read():
    names = [f'"{number}": {{}}' for number in range(40_000)]
    text = "{" + ", ".join([*names, names[-1]]) + "}"
    with pytest.raises(FormatError, match="the key '39999' appears twice"):  # by quadratic work in minutes
        opened(raw(text.encode()))


def test_more_axes_than_torch_has_are_refused():
    with pytest.raises(FormatError, match="a: expected a shape of at most 64"):
        opened(raw({"a": entry(shape=(1,) * 65, offsets=(0, 4))}, bytes(4)))


@given(st.binary(max_size=9))
def test_bytes_that_are_no_file_raise_nothing_else(data):
    fails(FormatError, "BytesIO", opened, data)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_reads_as_the_reference_reads_it(at, value):
    data = bytearray(stored({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int64)}))
    data[at % len(data)] = value
    try:
        found = opened(bytes(data)).tensors
    except FormatError:
        return
    reference = reference_load(bytes(data))
    assert {name: one.entry.shape for name, one in found.items()} == {n: tuple(t.shape) for n, t in reference.items()}
