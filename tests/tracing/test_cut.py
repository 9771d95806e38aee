"""Parts of a step: what they keep, what they wait for, and what they refuse. That they compute the same when they are
run: tests/execution/test_channels.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from execution.parted import BATCHES, gradients_of, parameters_of, part_of, server_of, training, worker_of
from hocket.errors import InputError
from hocket.ir import Carried
from hocket.tracing import capture
from hocket.tracing.cut import Arrival, Departure, cut
from support.refusals import refused
from support.steps import update


@pytest.fixture(params=["sgd", "adam"])
def whole(request):
    return captured_training(adam=request.param == "adam")


def captured_training(adam):
    return part_of(adam, lambda captured: captured)[1]


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
    whole = captured_training(adam=True)
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
    refused(r"op '.*update.*' reads what '.*' makes; neither stays nor arrives", cut, whole, keep, (), ())


def test_memory_that_others_write_has_to_arrive(whole):
    keep = [op.name for op in whole.graph.ops if op.role != "update"]
    refused(r"'0.weight/update.*', which is not kept, writes '0.weight', which '0/addmm'", cut, whole, keep, (), ())


def test_names_and_buffers(whole):
    keep = [op.name for op in whole.graph.ops if op.role != "update"]
    refused("the step has no op 'nothing'", cut, whole, ["nothing"], (), ())
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

    found.step(BATCHES[0])
    return capture(step, found.model, found.optimizer, BATCHES[0])


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
    whole = captured_step(model, summed, torch.randn(2, 3))
    drawing = [op.name for op in whole.graph.ops if "random generator" in op.writes]
    assert len(drawing) == 2
    with pytest.raises(InputError, match="which is not kept, writes 'random generator'"):
        cut(whole, [drawing[1], *set(whole.graph.predecessors[drawing[1]]) - {drawing[0]}], (), ())


def test_lists_that_a_step_appends_to(whole):
    appending = replace(whole, trace=replace(whole.trace, appended=(object(),)))
    refused("appends to lists, and a part of it cannot", cut, appending, [], (), ())


def captured_step(model, step, batch, rate=0.1):
    """A captured step of a function of model, optimizer and batch that returns a loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def whole(batch):
        return update(optimizer, step(model, optimizer, batch))

    whole(batch)
    return capture(whole, model, optimizer, batch)


def summed(model, optimizer, batch):
    return model(batch).sum()


def named(captured, *targets):
    """The first op of each target."""
    return [next(op.name for op in captured.graph.ops if target in op.target) for target in targets]


@pytest.fixture(scope="module")
def in_place():
    """One value, read before and after it is written in place."""

    def step(model, optimizer, batch):
        value = model(batch)
        before = value.detach() * 2
        value.add_(1)
        return (value * 3 + before).sum()

    return captured_step(nn.Linear(3, 3), step, torch.randn(2, 3))


def test_what_is_written_in_place_elsewhere_cannot_be_used_before_that(in_place):
    make, write = named(in_place, "addmm", "add_")
    early = next(name for name in in_place.graph.successors[make] if "mul" in in_place.graph[name].target)
    with pytest.raises(InputError, match=f"arrives as '{write}', which is not kept, leaves it, and '{early}' uses"):
        cut(in_place, [early], [Arrival("r", f"{make}:0", "p")], ())


def test_what_is_written_in_place_elsewhere_cannot_be_sent(in_place):
    make, write = named(in_place, "addmm", "add_")
    arrivals = [Arrival(f"r:{name}", name, "s") for name in ("weight", "bias")]
    with pytest.raises(InputError, match=f"'{make}:0' is to be sent, and '{write}', which writes it, is not kept"):
        cut(in_place, [make], arrivals, [Departure("d", f"{make}:0", "p")])
    whole = cut(in_place, [make, write], arrivals, [Departure("d", f"{make}:0", "p")])
    assert set(whole.graph.predecessors["d"]) == {make, write}


def test_memory_that_nobody_here_writes_is_not_sent_while_others_write_it(whole):
    with pytest.raises(InputError, match=r"'0.weight' is to be sent, and '0.weight/update.*', which writes it, is not"):
        cut(whole, [], (), [Departure("d", "0.weight", "s")])


class Runs(nn.Module):
    """Updates a statistic in each forward, and uses it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, batch):
        value = self.layer(batch)
        self.mean.add_(value.detach().mean(0))
        return value * self.mean.clone()


def test_what_is_written_twice_elsewhere_cannot_be_used_in_between():
    captured = captured_step(Runs(), lambda model, optimizer, batch: model(model(batch)).sum(), torch.randn(2, 3))
    writes = [op.name for op in captured.graph.ops if "mean" in op.writes]
    uses = [op.name for op in captured.graph.ops if "mean" in op.reads and op.name not in writes]
    assert (len(writes), len(uses)) == (2, 2)
    arrival = Arrival("r", "mean", "p")
    with pytest.raises(InputError, match=f"'{uses[0]}' uses it between '{writes[0]}' and '{writes[1]}', which are not"):
        cut(captured, uses[:1], [arrival], ())
    assert cut(captured, uses[1:], [arrival], ()).graph.predecessors[uses[1]] == ("r",)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("last", torch.zeros(2, 3))

    def forward(self, batch):
        value = self.layer(batch) + self.last
        self.last = value.detach() * 0.5
        return value


def test_a_place_that_is_bound_anew_elsewhere_is_not_read_here():
    captured = captured_step(Remembers(), summed, torch.randn(2, 3))
    made = Arrival("made", "layer/addmm:0", "p")
    with pytest.raises(
        InputError, match="op 'add' reads 'last', which 'mul', which is not kept, makes for the next step"
    ):
        cut(captured, ["add"], [made], ())
    with pytest.raises(InputError, match="'r' is to carry 'last', which each step binds anew"):
        cut(captured, ["add", "mul"], [made, Arrival("r", "last", "p")], ())
    kept = cut(captured, ["add", "mul"], [made], ())
    assert [entry.name for entry in kept.trace.rebound] == ["last"]
    assert not cut(captured, ["sum"], [Arrival("r", "add:0", "p")], ()).trace.rebound


class Counts(torch.optim.SGD):
    """Counts its steps in a number."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        super().step()


def test_a_number_that_is_read_here_is_counted_on_here():
    def step(batch):
        return update(optimizer, model(batch).sum() * (1.0 + optimizer.state[model.weight].get("count", 0)))

    model = nn.Linear(3, 3)
    optimizer = Counts(model.parameters(), lr=0.1)
    step(torch.randn(2, 3))
    captured = capture(step, model, optimizer, torch.randn(2, 3))
    forward = [op.name for op in captured.graph.ops if op.role != "update"]
    arrivals = [Arrival(f"r:{name}", name, "s") for name in ("weight", "bias")]
    assert len(captured.trace.numbers) == 2
    assert [entry.owner for entry in cut(captured, forward, arrivals, ()).trace.numbers] == ["weight"]
    assert not cut(captured, named(captured, "addmm"), arrivals, ()).trace.numbers


def test_a_number_in_a_tensor_belongs_to_who_counts_it():
    whole = captured_training(adam=True)
    count = next(buffer.name for buffer in whole.graph.buffers if buffer.name.endswith("0.weight.step"))
    (counts,) = [op.name for op in whole.graph.ops if count in op.writes]
    keep = [op.name for op in whole.graph.ops if op.role == "update" and op.name != counts]
    arrivals = [Arrival(f"recv:{name}.grad", b, "w") for name, b in gradients_of(whole).items()]
    with pytest.raises(InputError, match=f"reads the number in '{count}', which '{counts}', which is not kept, writes"):
        cut(whole, keep, arrivals, ())


def test_inputs_that_share_memory_are_not_moved():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.randn(12)
            self.first, self.second = nn.Parameter(memory[:9].view(3, 3)), nn.Parameter(memory[9:])

        def forward(self, batch):
            return batch @ self.first + self.second

    captured = captured_step(Flat(), summed, torch.randn(2, 3))
    keep = [op.name for op in captured.graph.ops if op.role != "update"]
    with pytest.raises(InputError, match="'first' shares its memory with 'second'; it cannot be moved"):
        cut(captured, keep, [Arrival("r", "first", "s")], ())


def test_a_part_without_the_batch_is_given_none():
    def step(batch):
        return update(optimizer, model(batch).sum()), batch, batch[0]

    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(torch.randn(2, 3))
    whole = capture(step, model, optimizer, torch.randn(2, 3))
    server, worker = server_of(whole), worker_of(whole)
    assert server.begin(None) is not None
    assert [kind for kind, _ in server.trace.result.leaves] == ["value"] * 3
    assert [kind for kind, _ in worker.trace.result.leaves] == [kind for kind, _ in whole.trace.result.leaves]
    with pytest.raises(InputError, match="is of the batch and cannot arrive; give the part that batch"):
        cut(whole, [], [Arrival("r", "batch[0]" if "batch[0]" in server_buffers(whole) else "batch", "p")], ())


def server_buffers(whole) -> set[str]:
    return {buffer.name for buffer in whole.graph.buffers}


def test_gradients_of_other_parts_are_none(whole):
    forward = [op.name for op in whole.graph.ops if op.role == "forward"]
    part = cut(whole, forward, [Arrival(f"recv:{name}", name, "s") for name in parameters_of(whole)], ())
    assert part.trace.gradients.keys() == whole.trace.gradients.keys()
    assert not any(part.trace.gradients.values())
