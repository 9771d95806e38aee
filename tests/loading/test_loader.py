"""A model computes the same while its weights stream in as with all of them."""

import copy
import gc
import threading
import weakref

import pytest
import torch

import hocket
from hocket.loading import finish, load
from loading.files import PATIENCE_S, HeldBack, Memory, OneWay, stored, untied
from loading.nets import Net, nothing_remains, output, threads
from support.steps import update


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("how", ["reader", "path", "stream", "file order", "names", "meta"])
def test_the_output_is_that_of_the_stored_weights(tmp_path, how, training):
    trained, model = Net(1), Net(2)
    data = stored(untied(trained))
    (tmp_path / "w.safetensors").write_bytes(data)
    file = {"path": tmp_path / "w.safetensors", "stream": OneWay(data)}.get(how, Memory(data))
    order = {"file order": "file", "names": ["shift", "words.weight"]}.get(how, "auto")
    if how == "meta":
        with torch.device("meta"):
            model = Net(2)
        model.mask = torch.ones(8)
    before = dict(model.named_parameters())
    assert hocket.load(model, file, order=order) is model
    assert torch.equal(output(model, training), output(trained, training))
    nothing_remains(model)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.head.weight is model.words.weight
    if how != "meta":
        assert all(parameter is before[name] for name, parameter in model.named_parameters())


EIGHT_BITS = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16, torch.float64, torch.float32, *EIGHT_BITS])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_become_the_models(monkeypatch, kept, wanted):
    monkeypatch.setattr("hocket.loading.stream.CHUNK_BYTES", 1024)
    values = {"weight": torch.randn(70, 31).to(kept), "bias": torch.randn(70).to(kept)}
    model, plain = torch.nn.Linear(31, 70).to(wanted), torch.nn.Linear(31, 70).to(wanted)
    plain.load_state_dict(values)
    load(model, Memory(stored(values)))
    finish(model)
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.bias, plain.bias)
    assert model.weight.dtype == wanted


def test_channels_last_and_inference_parameters_keep_their_form():
    trained = torch.nn.Conv2d(3, 5, 3)
    model = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        second = torch.nn.Conv2d(3, 5, 3)
    for one in (model, second):
        load(one, Memory(stored(trained.state_dict())))
        finish(one)
        assert torch.equal(one.weight, trained.weight)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


class TiedByMemory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3))
        self.b = torch.nn.Parameter(self.a.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_tensor_of_one_element_is_read_whatever_its_stride(dtype):
    model = torch.nn.Module()
    model.register_buffer("one", torch.empty_strided((1,), (2,), dtype=dtype))
    load(model, Memory(stored({"one": torch.ones(1, dtype=dtype)})))
    finish(model)
    assert torch.equal(model.one, torch.ones(1, dtype=dtype))
    assert model.one.stride() == (2,)


def test_parameters_that_share_their_memory_arrive_together():
    model = TiedByMemory()
    load(model, Memory(stored({"a": torch.ones(3)})))
    assert model.b.sum() == 3
    nothing_remains(model)


def test_of_both_copies_of_a_tied_weight_the_last_counts_as_in_torch():
    state = {**Net(1).state_dict(), "words.weight": torch.zeros(11, 8), "head.weight": torch.ones(11, 8)}
    model, plain = Net(2), Net(3)
    plain.load_state_dict(state)
    load(model, Memory(stored(state)))
    finish(model)
    assert torch.equal(model.head.weight, plain.head.weight)


def test_files_from_before_batch_norm_counted_are_read():
    state = untied(Net(1))
    del state["norm.num_batches_tracked"]
    with torch.device("meta"):
        without_memory = Net(2)
    without_memory.mask = torch.ones(8)
    for model in (Net(2), without_memory):
        load(model, Memory(stored(state)))
        finish(model)
        assert model.norm.num_batches_tracked == 0


def test_a_second_load_waits_for_the_first():
    model = torch.nn.Linear(2, 3)
    first = HeldBack(stored({"weight": torch.ones(3, 2), "bias": torch.ones(3)}))
    load(model, first)
    first.is_asked()
    second = threading.Thread(
        target=load, args=(model, Memory(stored({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})))
    )
    second.start()
    assert threads() != []
    first.let_go(100)
    second.join(PATIENCE_S)
    finish(model)
    assert model.weight.sum() == 0
    nothing_remains(model)


def test_the_model_is_let_go_when_all_has_arrived():
    model = Net(1)
    load(model, Memory(stored(untied(Net(2)))))
    finish(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_copies_made_meanwhile_have_the_weights():
    trained, model = Net(1), Net(2)
    load(model, Memory(stored(untied(trained))))
    copied = copy.deepcopy(model)
    assert torch.equal(output(copied), output(trained))
    assert {type(parameter) for parameter in copied.parameters()} == {torch.nn.Parameter}
    assert torch.equal(output(model), output(trained))


def test_training_goes_on_as_from_a_loaded_state():
    trained = Net(1)
    losses = []
    for streamed in (True, False):
        model = Net(2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if streamed:
            load(model, Memory(stored(untied(trained))))
        else:
            model.load_state_dict(trained.state_dict())
        for _ in range(3):
            loss = update(optimizer, output(model, training=True).square().mean())
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("where", ["layer", "encoder", "attention"])
def test_torchs_own_attention_takes_the_way_that_it_takes_for_ordinary_tensors(where):
    def made(seed):
        torch.manual_seed(seed)
        if where == "attention":
            return torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        return layer if where == "layer" else torch.nn.TransformerEncoder(layer, 2).eval()

    def run(model):
        torch.manual_seed(0)
        x = torch.randn(2, 5, 8)
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad():
            return model(x, x, x, mask)[0] if where == "attention" else model(x, src_key_padding_mask=mask)

    trained, model = made(1), made(2)
    expected = run(trained)
    load(model, Memory(stored(trained.state_dict())))
    copied = copy.deepcopy(model)
    for one in (model, copied):
        found = run(one)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
        nothing_remains(one)
