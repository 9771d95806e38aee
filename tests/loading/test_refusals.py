"""Files, readers and arguments that do not fit are named, and nothing is half loaded."""

import copy
import json
import os
import threading

import pytest
import torch

from hocket.errors import ExecutionError, FormatError, InputError
from hocket.loading import finish, load
from loading.files import Failing, Memory, stored, untied
from loading.nets import Net, nothing_remains, output, threads
from support.refusals import fails, refused


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


@pytest.mark.parametrize("after", [0, 4, 300, 1000])
def test_a_reader_that_fails_is_told_by_the_forward_each_time(after):
    trained, model = Net(1), Net(2)
    data = stored(untied(trained))
    reader = Failing(data, after)
    load(model, reader, order=["other.weight", "conv.weight"])
    for _ in range(2):
        fails(ExecutionError, r"'[a-z._]+' has not arrived: memory: ConnectionResetError: the peer", output, model)
    with pytest.raises(ExecutionError):
        finish(model)
    assert threads() == []
    load(model, Memory(data))
    assert torch.equal(output(model), output(trained))
    nothing_remains(model)


def test_what_failed_to_arrive_stays_an_error_after_a_load_of_the_rest(monkeypatch):
    monkeypatch.setattr("hocket.loading.stream.MAX_TOGETHER", 1)
    values = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    model = torch.nn.Linear(2, 3)
    load(model, Failing(stored(values), 0))
    with pytest.raises(ExecutionError):
        finish(model)
    load(model, Memory(stored({"weight": values["weight"]})), strict=False)
    assert model.weight.sum() == 6
    fails(ExecutionError, "'bias' has not arrived", model, torch.ones(2))


def test_what_a_file_has_for_a_module_that_is_none_is_no_error():
    trained, model = (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3)) for _ in range(2))
    model[1] = None
    load(model, Memory(stored(trained.state_dict())))
    assert torch.equal(model[0](torch.ones(2)), trained[0](torch.ones(2)))
    refused("Unexpected key", load, model, Memory(stored({**trained.state_dict(), "1": torch.ones(1)})))


def test_what_has_arrived_before_a_failure_can_be_used(monkeypatch):
    monkeypatch.setattr("hocket.loading.stream.MAX_TOGETHER", 1)
    model = torch.nn.Linear(2, 3)
    load(model, Failing(stored({"weight": torch.ones(3, 2), "bias": torch.ones(3)}), 24), order=["weight"])
    assert model.weight.sum() == 6
    fails(ExecutionError, "'bias' has not arrived", model, torch.ones(2))


def test_a_file_that_turns_out_to_be_truncated_is_told_with_the_tensor():
    data = stored({"weight": torch.ones(3, 2), "bias": torch.ones(3)})
    reader = Memory(data[:-4])
    del reader.size
    reader.size = None
    model = torch.nn.Linear(2, 3)
    load(model, reader)
    fails(ExecutionError, r"has not arrived: memory: FormatError: .* truncated: 4 more bytes", model, torch.ones(2))
    with pytest.raises(FormatError, match="truncated"):
        load(model, Memory(data[:-4]))


def test_a_stream_that_cannot_start_is_told(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    model = torch.nn.Linear(2, 3)
    data = stored({"weight": torch.ones(3, 2), "bias": torch.ones(3)})
    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            load(model, Memory(data))
    fails(ExecutionError, "'weight' has not arrived: memory: RuntimeError: can't start", model, torch.ones(2))
    load(model, Memory(data))
    assert model(torch.ones(2)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased/model.safetensors"])
def test_a_name_that_is_no_file_is_told_what_is_expected(name):
    with pytest.raises(
        FileNotFoundError, match=r"no such file; expected the path of a safetensors file.*not looked up"
    ):
        load(torch.nn.Linear(2, 3), name)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path / "zero.json"):
        fails(FormatError, "expected a regular file", load, torch.nn.Linear(2, 3), path)
    refused("expected a path, got", load, torch.nn.Linear(2, 3), ["a\0b"])


@pytest.mark.parametrize("name", ["a\0b", "../a", "/etc/passwd", "", "..", 3, "x" * 1_000_000 + "/"])
def test_an_index_names_files_beside_it(tmp_path, name):
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(FormatError, match=r"weight_map: weight: expected a file beside the index") as caught:
        load(torch.nn.Linear(2, 3), path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": ' + "9" * 5000 + "}", '{"a": "\\ud800"}'])
def test_an_index_that_is_hostile_is_one_error(tmp_path, text):
    path = tmp_path / "index.json"
    path.write_text(text)
    fails(FormatError, r"index\.json: not JSON", load, torch.nn.Linear(2, 3), path)


def test_arguments_are_checked():
    model = Net(1)
    data = stored(untied(model))
    refused(r"expected a torch.nn.Module, got list", load, [model], Memory(data))
    refused("order: expected one of auto, registration, file", load, model, Memory(data), order="best")
    refused(r"order: expected one of .* or a list of names, got None", load, model, Memory(data), order=None)
    refused("order: not in the model and the file: nothing", load, model, Memory(data), order=["shift", "nothing"])
    refused("device: 'abacus'", load, model, Memory(data), device="abacus")
    refused("one that has memory", load, model, Memory(data), device="meta")
    nothing_remains(model)


def test_tensors_and_contents_in_place_of_a_file_are_told():
    state = untied(Net(2))
    refused(r"expected files, got a dict; of tensors in memory, call model\.load_state_dict", load, Net(1), state)
    with pytest.raises(InputError, match=r"pass io\.BytesIO\(content\)") as error:
        load(Net(1), stored(state))
    assert len(str(error.value)) < 1000
    refused("order: not in the model and the file: 3", load, Net(1), Memory(stored(state)), order=[3])
