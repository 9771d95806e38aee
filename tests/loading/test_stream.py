"""The order in which tensors are read, and what waits for which."""

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.loading import finish, load
from hocket.loading.held import is_held, waiting_for
from loading.files import HeldBack, Memory, laid_out, stored, untied
from loading.nets import Net, nothing_remains, output


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
