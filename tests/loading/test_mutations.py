"""Mutated safetensors files and indices are refused by name, or have the tensors that safetensors finds."""

import io
import json
import random

import pytest
import torch
from safetensors.torch import load as reference_load

from hocket.errors import FormatError, InputError
from hocket.loading import open_weights
from loading.files import stored
from support.mutations import mutated

TENSORS = {f"layer.{number}": torch.ones(number + 1, 2) for number in range(6)}
many = pytest.mark.parametrize("number", [300, pytest.param(5000, marks=pytest.mark.slow)])


@many
def test_mutated_files_are_refused_or_read_as_the_reference_reads_them(number):
    sound = stored(TENSORS, {"made": "1"})
    length = int.from_bytes(sound[:8], "little")
    for case in range(number):
        generator = random.Random(case)
        if case % 2:
            content = mutated(sound, generator)
        else:  # the length is right, so that the header itself is read
            header = mutated(sound[8 : 8 + length], generator)
            content = len(header).to_bytes(8, "little") + header + sound[8 + length :]
        try:
            found = open_weights(io.BytesIO(content)).tensors
        except FormatError:
            continue
        reference = reference_load(content)
        assert {name: one.entry.shape for name, one in found.items()} == {
            name: tuple(tensor.shape) for name, tensor in reference.items()
        }, case


@many
def test_mutated_indices_are_refused_or_read(tmp_path, number):
    (tmp_path / "a.safetensors").write_bytes(stored(TENSORS))
    path = tmp_path / "model.safetensors.index.json"
    sound = json.dumps({"metadata": {"size": 1}, "weight_map": dict.fromkeys(TENSORS, "a.safetensors")}).encode()
    for case in range(number):
        path.write_bytes(mutated(sound, random.Random(case)))
        try:
            weights = open_weights(path)
        except (FormatError, InputError, OSError):
            continue
        weights.close()
        assert weights.tensors.keys() == TENSORS.keys(), case
