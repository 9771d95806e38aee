"""Parts of a step: what they keep, what they wait for, and what they refuse. That they compute the same when they are
run: tests/execution/test_channels.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from execution.parted import batches, captured_of, gradients_of, parameters_of, server_of, training, worker_of
from hocket.errors import InputError
from hocket.ir import Carried
from hocket.tracing import capture
from hocket.tracing.cut import Arrival, Departure, cut


@pytest.fixture(params=["sgd", "adam"])
def whole(request):
    found = training(adam=request.param == "adam")
    found.step(batches(1)[0])
    return captured_of(found, batches(1)[0])


def test_a_worker_receives_each_parameter_before_who_reads_it_and_sends_each_gradient(whole):
    part = worker_of(whole)
    assert not [op for op in part.graph.ops if op.role == "update"]
    for name in parameters_of(whole):
        readers = {op.name for op in part.graph.ops if name in op.reads}
        assert readers
        assert set(part.graph.successors[f"recv:{name}"]) == readers
        assert {Carried(reader, f"recv:{name}") for reader in readers} <= set(part.graph.carried)
    for name, buffer in gradients_of(whole).items():
        maker = next(op.name for op in part.graph.ops if buffer in op.writes)
        assert part.graph.predecessors[f"send:{name}.grad"] == (maker,)
    sizes = {op.name: op.size_bytes for op in part.graph.ops}
    assert sizes["recv:0.weight"] == sizes["send:0.weight.grad"] == 8 * 4 * 5


def test_a_server_has_the_updates_and_what_only_they_need(whole):
    part = server_of(whole)
    assert {op.role for op in part.graph.ops} == {"recv", "update", "send"}
    assert not [source.name for _, source in part.inputs if source.kind == "batch"]
    assert part.trace.gradients.keys() == whole.trace.gradients.keys()  # they arrive
    assert [leaf for leaf in part.trace.result.leaves if leaf[0] != "value"] == []
    assert part.begin(None) is not None
    for name in parameters_of(whole):
        writers = [op.name for op in part.graph.ops if name in op.writes]
        assert part.graph.predecessors[f"send:{name}"][-1:] == tuple(writers[-1:])
        assert Carried(f"send:{name}", writers[0]) in part.graph.carried


def test_numbers_go_with_the_part_that_changes_them():
    found = training(adam=True)
    found.step(batches(1)[0])
    whole = captured_of(found, batches(1)[0])
    worker, server = worker_of(whole), server_of(whole)
    optimizers = {entry.name for entry in whole.trace.numbers if entry.kind in ("group", "state")}
    assert {entry.name for entry in worker.trace.numbers}.isdisjoint(optimizers)
    assert {entry.name for entry in server.trace.numbers} >= optimizers
    assert len(worker.trace.tape.leaves) < len(whole.trace.tape.leaves)
    assert len(worker.trace.tape.entries) == len(whole.trace.tape.entries)


def test_all_of_a_step_is_the_step(whole):
    part = cut(whole, [op.name for op in whole.graph.ops], (), ())
    assert part.graph == whole.graph
    assert part.program.actions == whole.program.actions
    assert part.trace.gradients == whole.trace.gradients


def test_what_neither_stays_nor_arrives_is_named(whole):
    keep = [op.name for op in whole.graph.ops if op.role == "update"]
    with pytest.raises(InputError, match=r"op '.*update.*' reads what '.*' makes; neither stays nor arrives"):
        cut(whole, keep, (), ())


def test_memory_that_others_write_has_to_arrive(whole):
    keep = [op.name for op in whole.graph.ops if op.role != "update"]
    with pytest.raises(InputError, match=r"'0.weight/update.*', which is not kept, writes '0.weight', which '0/addmm'"):
        cut(whole, keep, (), ())


def test_names_and_buffers(whole):
    keep = [op.name for op in whole.graph.ops if op.role != "update"]
    with pytest.raises(InputError, match="the step has no op 'nothing'"):
        cut(whole, ["nothing"], (), ())
    with pytest.raises(InputError, match="expected a name of its own without white space, got '0/addmm'"):
        cut(whole, keep, [Arrival("0/addmm", "0.weight", "s")], ())
    with pytest.raises(InputError, match="'r' is to carry 'nowhere', which is no buffer of the step"):
        cut(whole, keep, [Arrival("r", "nowhere", "s")], ())
    with pytest.raises(InputError, match="a buffer arrives twice"):
        cut(whole, keep, [Arrival("r", "0.weight", "s"), Arrival("q", "0.weight", "s")], ())
    with pytest.raises(InputError, match="'0/addmm:0' arrives, and the op that makes it is kept, too"):
        cut(whole, keep, [Arrival("r", "0/addmm:0", "s")], ())
    with pytest.raises(InputError, match="'0/addmm:0' is to be sent, and '0/addmm', which makes it, is not kept"):
        cut(whole, [], (), [Departure("d", "0/addmm:0", "s")])


def clipping():
    found = training()

    def step(batch):
        found.optimizer.zero_grad()
        loss = nn.functional.mse_loss(found.model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(found.model.parameters(), 0.1)
        found.optimizer.step()
        return loss

    found.step(batches(1)[0])
    return capture(step, found.model, found.optimizer, batches(1)[0])


def test_a_gradient_that_is_clipped_elsewhere_goes_out_unfinished():
    whole = clipping()
    keep = [op.name for op in whole.graph.ops if op.role not in ("update", "other")]
    arrivals = [Arrival(f"recv:{name}", name, "server") for name in parameters_of(whole)]
    buffers = [f"{op.name}:0" for op in whole.graph.ops if op.role in ("weight_grad", "bias_grad")]
    with pytest.raises(InputError, match="is to be sent, and '_foreach_mul_', which writes it, is not kept"):
        cut(whole, keep, arrivals, [Departure(f"send:{name}", name, "server") for name in buffers])
    part = cut(whole, keep, arrivals, [Departure(f"send:{b}", b, "server", unfinished=True) for b in buffers])
    assert {op.name for op in part.graph.ops if op.role == "send"} == {f"send:{name}" for name in buffers}
    reader = next(op.name for op in whole.graph.ops if op.role == "update" and buffers[0] in op.reads)
    with pytest.raises(InputError):  # it would read what is not finished
        cut(whole, [*keep, reader], arrivals, [Departure("send", buffers[0], "server", unfinished=True)])


def test_a_generator_is_one_stream_of_numbers():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        return loss

    whole = capture(step, model, optimizer, torch.randn(2, 3))
    drawing = [op.name for op in whole.graph.ops if "random generator" in op.writes]
    assert len(drawing) == 2
    with pytest.raises(InputError, match="which is not kept, writes 'random generator'"):
        cut(whole, [drawing[1], *set(whole.graph.predecessors[drawing[1]]) - {drawing[0]}], (), ())


def test_lists_that_a_step_appends_to(whole):
    appending = replace(whole, trace=replace(whole.trace, appended=(object(),)))
    with pytest.raises(InputError, match="appends to lists, and a part of it cannot"):
        cut(appending, [], (), ())
