from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hocket
from hocket.errors import ExecutionError, FormatError, InputError
from hocket.loading import finish, load
from hocket.loading.held import is_held, waiting_for
from loading.files import PATIENCE_S, Failing, HeldBack, Memory, OneWay, laid_out, stored, untied


class Net(torch.nn.Module):
    """Conv, batch norm, an embedding that is tied to the head, and a layer whose weight another one uses."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.words = torch.nn.Embedding(11, 8)
        self.head.weight = self.words.weight
        self.conv = torch.nn.Conv1d(8, 8, 1)
        self.norm = torch.nn.BatchNorm1d(8)
        self.other = torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.rand(()))
        self.register_buffer("shift", torch.rand(8))
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.register_buffer("none", None)
        self.empty = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, tokens):
        x = self.norm(self.conv(self.words(tokens).transpose(1, 2))).transpose(1, 2)
        x = F.linear(x, self.other.weight) * self.scale + self.shift * self.mask
        return self.head(x) + self.empty.sum()


TOKENS = torch.arange(6).reshape(2, 3)


def output(model, training=False):
    torch.manual_seed(1)
    return model.train(training)(TOKENS)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "hocket weights"]


def nothing_remains(model):
    finish(model)
    for thread in threads():
        thread.join(PATIENCE_S)  # the last tensor is there a moment before the thread has ended
    assert threads() == []
    assert {type(tensor) for tensor in (*model.parameters(), *model.buffers())} <= {torch.nn.Parameter, torch.Tensor}
    assert not any("_hocket_hold" in vars(tensor) for tensor in (*model.parameters(), *model.buffers()))
    assert not any(module._forward_pre_hooks for module in model.modules())


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


@given(st.permutations(["conv.weight", "words.weight", "other.weight", "shift", "norm.running_mean"]))
def test_any_order_gives_the_same(order):
    trained, model = Net(1), Net(2)
    reader = Memory(stored(untied(trained)))
    load(model, reader, order=order)
    assert torch.equal(output(model), output(trained))
    nothing_remains(model)


def test_the_forward_waits_for_what_it_uses_and_for_nothing_else(monkeypatch):
    monkeypatch.setattr("hocket.loading.stream.MAX_TOGETHER", 1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    want = [torch.full_like(parameter, 0.5) for parameter in model.parameters()]
    found = dict(zip([name for name, _ in model.named_parameters()], want, strict=True))
    reader = HeldBack(laid_out({name: found[name] for name in ("1.weight", "0.weight", "1.bias", "0.bias")}))
    load(model, reader, order=["0.bias", "1.bias", "0.weight", "1.weight"])
    done = threading.Event()

    def first():
        model[0](torch.ones(1, 2))
        done.set()

    waiting = threading.Thread(target=first)
    waiting.start()
    reader.is_asked()
    assert not done.is_set()
    while not done.is_set():
        reader.let_go()
        if done.wait(0.2):
            break
    waiting.join()
    held = [name for name, parameter in model.named_parameters() if is_held(parameter)]
    assert "0.weight" not in held
    assert "0.bias" not in held
    assert "1.weight" in held
    reader.let_go(100)
    nothing_remains(model)
    assert all(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), want, strict=True))


def test_what_is_waited_for_is_read_next_and_the_order_goes_on_from_there(monkeypatch):
    monkeypatch.setattr("hocket.loading.stream.MAX_TOGETHER", 1)
    names = [f"t{number}" for number in range(6)]
    model = torch.nn.Module()
    for name in names:
        model.register_buffer(name, torch.zeros(2))
    reader = HeldBack(laid_out({name: torch.ones(2) for name in reversed(names)}))
    load(model, reader, order=names)
    reader.is_asked()
    waiting = threading.Thread(target=lambda: model.t4.sum())
    waiting.start()
    stream = waiting_for(model.t4).stream
    while not stream._wanted:
        pass
    reader.let_go(100)
    waiting.join()
    nothing_remains(model)
    assert reader.order()[0] == "t0"
    assert [name for name in reader.order() if name in ("t1", "t5")] == ["t5", "t1"]


def test_neighbours_are_read_together():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    reader = Memory(stored(dict(model.state_dict())))
    load(model, reader)
    finish(model)
    assert len(reader.asked) == 2 + 1  # two for the header, and one for tensors that all lie side by side
    assert sum(length for _, length in reader.asked[2:]) == sum(p.nbytes for p in model.parameters())


def test_large_tensors_come_in_chunks(monkeypatch):
    monkeypatch.setattr("hocket.loading.stream.CHUNK_BYTES", 64)
    trained, model = Net(1), Net(2)
    reader = Memory(stored(untied(trained)))
    load(model, reader)
    assert torch.equal(output(model), output(trained))
    nothing_remains(model)
    assert max(length for _, length in reader.asked[2:]) <= 64


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
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


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("conv.weight"),
        lambda state: state.update(more=torch.ones(1)),
        lambda state: state.update({"conv.weight": torch.ones(8, 8, 2)}),
        lambda state: (state.pop("shift"), state.update({"a.b": torch.ones(2), "scale": torch.ones(2)})),
    ],
)
def test_a_file_of_another_model_is_told_as_torch_tells_it(change):
    model = Net(1)
    state = dict(Net(2).state_dict())
    change(state)
    with pytest.raises(RuntimeError) as theirs:
        Net(1).load_state_dict(state)
    before = copy.deepcopy(model.state_dict())
    state.pop("words.weight")
    with pytest.raises(InputError) as ours:
        load(model, Memory(stored(state)))
    told = {line.strip() for line in str(theirs.value).splitlines()}
    assert told == {line.strip() for line in str(ours.value).removeprefix("memory: ").splitlines()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert threads() == []


def test_not_strict_loads_what_is_on_both_sides():
    trained, model = Net(1), Net(2)
    state = untied(trained)
    del state["shift"]
    kept = model.shift.clone()
    load(model, Memory(stored({**state, "more": torch.ones(2)})), strict=False)
    finish(model)
    assert torch.equal(model.conv.weight, trained.conv.weight)
    assert torch.equal(model.shift, kept)


def test_a_dtype_that_cannot_become_the_models_is_named():
    model = torch.nn.Module()
    model.register_buffer("running_count", torch.zeros((), dtype=torch.int64))
    with pytest.raises(InputError, match=r"dtype mismatch for running_count: F32 in memory cannot become torch.int64"):
        load(model, Memory(stored({"running_count": torch.zeros(())})))


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


@pytest.mark.parametrize("after", [0, 4, 300, 1000])
def test_a_reader_that_fails_is_told_by_the_forward_each_time(after):
    trained, model = Net(1), Net(2)
    data = stored(untied(trained))
    reader = Failing(data, after)
    load(model, reader, order=["other.weight", "conv.weight"])
    for _ in range(2):
        with pytest.raises(ExecutionError, match=r"'[a-z._]+' has not arrived: memory: ConnectionResetError: the peer"):
            output(model)
    with pytest.raises(ExecutionError):
        finish(model)
    assert threads() == []
    load(model, Memory(data))
    assert torch.equal(output(model), output(trained))
    nothing_remains(model)


def test_what_has_arrived_before_a_failure_can_be_used(monkeypatch):
    monkeypatch.setattr("hocket.loading.stream.MAX_TOGETHER", 1)
    model = torch.nn.Linear(2, 3)
    load(model, Failing(stored({"weight": torch.ones(3, 2), "bias": torch.ones(3)}), 24), order=["weight"])
    assert model.weight.sum() == 6
    with pytest.raises(ExecutionError, match="'bias' has not arrived"):
        model(torch.ones(2))


def test_a_file_that_turns_out_to_be_truncated_is_told_with_the_tensor():
    data = stored({"weight": torch.ones(3, 2), "bias": torch.ones(3)})
    reader = Memory(data[:-4])
    del reader.size
    reader.size = None
    model = torch.nn.Linear(2, 3)
    load(model, reader)
    with pytest.raises(ExecutionError, match=r"has not arrived: memory: FormatError: .* truncated: 4 more bytes"):
        model(torch.ones(2))
    with pytest.raises(FormatError, match="truncated"):
        load(model, Memory(data[:-4]))


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


def test_a_stream_that_cannot_start_is_told(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    model = torch.nn.Linear(2, 3)
    data = stored({"weight": torch.ones(3, 2), "bias": torch.ones(3)})
    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            load(model, Memory(data))
    with pytest.raises(ExecutionError, match="'weight' has not arrived: memory: RuntimeError: can't start"):
        model(torch.ones(2))
    load(model, Memory(data))
    assert model(torch.ones(2)).tolist() == [3, 3, 3]


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
            optimizer.zero_grad()
            loss = output(model, training=True).square().mean()
            loss.backward()
            optimizer.step()
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


def test_arguments_are_checked():
    model = Net(1)
    data = stored(untied(model))
    with pytest.raises(InputError, match=r"expected a torch.nn.Module, got list"):
        load([model], Memory(data))
    with pytest.raises(InputError, match="order: expected one of auto, registration, file"):
        load(model, Memory(data), order="best")
    with pytest.raises(InputError, match="order: not in the model and the file: nothing"):
        load(model, Memory(data), order=["shift", "nothing"])
    with pytest.raises(InputError, match="device: 'abacus'"):
        load(model, Memory(data), device="abacus")
    with pytest.raises(InputError, match="one that has memory"):
        load(model, Memory(data), device="meta")
    nothing_remains(model)
