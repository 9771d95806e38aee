import io
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import hocket
from hocket.loading import finish, first_use, load, open_weights, recorded_first_use, reorder
from loading.files import Failing, Memory, OneWay, laid_out, stored, untied
from loading.nets import TOKENS, Net, nothing_remains, output
from support.refusals import refused


def test_first_use_is_seen_wherever_it_is_and_nothing_changes():
    model = Net(1).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    order = first_use(model, TOKENS)
    assert order == (
        *("head.weight", "words.weight", "conv.weight", "conv.bias", "norm.num_batches_tracked"),
        *("norm.running_mean", "norm.running_var", "norm.weight", "norm.bias", "other.weight", "other.bias"),
        *("scale", "shift", "empty"),
    )
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    nothing_remains(model)


class Counting(torch.nn.Linear):
    """Binds its count anew, and has a buffer that is one element in memory."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1).expand(3))

    def forward(self, x):
        self.count = self.count + 1
        return (super().forward(x) * self.mask).view(x.shape)


def test_buffers_that_a_forward_binds_anew_are_restored_also_where_it_raises():
    model = Counting()
    count = model.count
    assert first_use(model, torch.ones(3)) == ("count", "weight", "bias", "mask")
    assert model.count is count
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        first_use(model, torch.ones(2, 2))
    assert model.count is count
    assert count == 0


def test_a_block_that_raises_leaves_ordinary_tensors():
    model = Net(1)
    with pytest.raises(IndexError), recorded_first_use(model) as order:
        model.conv.weight[100]
    assert order[0] == "conv.weight"
    nothing_remains(model)


def test_a_compiled_model_is_refused():
    model = torch.nn.Linear(3, 2)
    model.compile(backend="eager")
    refused(r"order of first use cannot be observed: the model .Linear. is compiled", first_use, model, torch.ones(3))


def test_a_reordered_file_has_the_same_tensors_in_the_order_of_their_use(tmp_path):
    trained, model = Net(1), Net(2)
    order = first_use(model, TOKENS)
    target = tmp_path / "ordered.safetensors"
    reorder(io.BytesIO(stored(untied(trained), {"format": "pt"})), target, order)
    assert load_file(target).keys() == untied(trained).keys()
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in load_file(target).items())
    with target.open("rb") as file:
        weights = open_weights(file)
        assert weights.is_in_first_use_order
        assert weights.metadata[0]["format"] == "pt"
        assert list(weights.tensors) == [name for name in order if name in untied(trained)]
    reader = Memory(target.read_bytes())
    load(model, reader)
    assert torch.equal(output(model), output(trained))
    finish(model)
    assert [offset for offset, _ in reader.asked] == sorted(offset for offset, _ in reader.asked)
    again = Net(3)
    load(again, OneWay(target.read_bytes()))
    assert torch.equal(output(again), output(trained))
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


@given(
    st.lists(st.tuples(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]), st.integers(0, 5))),
    st.randoms(use_true_random=False),
)
def test_safetensors_reads_any_order(tmp_path_factory, kinds, random):
    tensors = {f"t{at}": torch.ones(size, dtype=dtype) for at, (dtype, size) in enumerate(kinds)}
    order = random.sample(sorted(tensors), len(tensors))
    target = tmp_path_factory.mktemp("files") / "w.safetensors"
    reorder(io.BytesIO(stored(tensors)), target, order)
    found = load_file(target)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())
    with_bytes = [name for name in order if tensors[name].numel()]
    assert [name for name in open_weights(target).tensors if tensors[name].numel()] == with_bytes


def test_several_files_become_one(tmp_path):
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    first.write_bytes(laid_out({"a": torch.ones(2), "b": torch.zeros(2)}))
    second.write_bytes(laid_out({"c": torch.ones(4)}))
    reorder([first, second], tmp_path / "all.safetensors", ["c", "b"])
    assert list(open_weights(tmp_path / "all.safetensors").tensors) == ["c", "b", "a"]


def test_nothing_half_written_stays(tmp_path):
    data = stored({"a": torch.ones(20), "b": torch.ones(2)})
    with pytest.raises(ConnectionResetError):
        reorder(Failing(data, 8), tmp_path / "w.safetensors", ["b"])
    refused("none of the tensors that the order names", reorder, Memory(data), tmp_path / "w.safetensors", ["c"])
    refused("cannot seek", reorder, OneWay(data), tmp_path / "w.safetensors", ["a"])
    assert list(tmp_path.iterdir()) == []


def test_the_module_is_there_before_anything_was_loaded():
    assert hocket.__getattr__("loading").first_use is first_use
