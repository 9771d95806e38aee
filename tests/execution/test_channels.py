"""Channel lanes beside lanes of Python threads and native ones: training in two parts, run ahead, failures."""

import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from execution.parted import (
    BATCHES,
    all_begun,
    arrive,
    both_ways,
    half_of,
    in_thread,
    part_of,
    plan_of,
    server_of,
    training,
    twin,
    worker_of,
)
from execution.probe import KINDS
from execution.wires import ManualChannel, connection
from hocket.checking import check, hazards
from hocket.errors import ExecutionError
from hocket.execution import executor
from hocket.ir import Lane, Plan
from support.refusals import fails


@pytest.fixture
def worker():
    """A worker's part, and everything that it runs on."""
    return part_of(False, worker_of)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("runs", [(False, False), (True, False), (True, True)], ids=["step by step", "ahead", "behind"])
def test_two_parts_train_as_the_whole_step_does(kind, adam, runs):
    eager = training(adam)
    eager.step(BATCHES[0])
    (_, work), (at_server, serve) = part_of(adam, worker_of), part_of(adam, server_of)
    plans = plan_of(work, "worker0", "server", cores=2), plan_of(serve, "server", "worker0")
    for part, plan in ((work, plans[0]), (serve, plans[1])):
        check(part.graph, plan)
        hazards(part.graph, plan)
    mine, its = connection(*runs)
    working = executor(work, plans[0], kind=kind, channels=both_ways("worker0", "server", mine))
    serving = executor(serve, plans[1], kind=kind, channels=both_ways("worker0", "server", its))
    for entry in serve.trace.places.parameters:
        its.push(entry.name, entry.get())
    failures = []

    def run_server():
        try:
            for _ in BATCHES:
                serving(None)
        except BaseException as error:
            failures.append(error)
            its.close()  # or the worker would wait for ever
            raise

    thread = threading.Thread(target=run_server, daemon=True)
    thread.start()
    losses = [(eager.step(batch), working(batch)) for batch in BATCHES]
    thread.join(60)
    assert not failures
    assert all(torch.equal(one, other) for one, other in losses)
    for one, other in zip(eager.model.parameters(), at_server.model.parameters(), strict=True):
        assert torch.equal(one, other)
    spans = {span.op for span in working.timeline().spans}
    assert spans == set(work.graph.by_name)
    mine.close()
    its.close()
    working.close()
    serving.close()


@pytest.mark.parametrize("kind", KINDS)
def test_two_halves_of_a_model_train_as_the_whole_does(kind):
    eager = training()
    eager.step(BATCHES[0])
    first, one = part_of(False, lambda captured: half_of(captured, {"0", "1"}, "second"))
    second, other = part_of(False, lambda captured: half_of(captured, {"2", ""}, "first"))
    assert {op.role for op in one.graph.ops} >= {"recv", "send", "forward", "weight_grad", "update"}
    ends = connection()
    running = []
    for part, me, peer, end in ((one, "first", "second", ends[0]), (other, "second", "first", ends[1])):
        plan = plan_of(part, me, peer)
        check(part.graph, plan)
        hazards(part.graph, plan)
        running.append(executor(part, plan, kind=kind, channels=both_ways(me, peer, end)))
    for batch in BATCHES:
        thread, found = in_thread(lambda batch=batch: running[0](batch))
        loss = running[1](batch)
        thread.join(20)
        assert found == [None]
        assert torch.equal(loss, eager.step(batch))
    for at, of in ((0, first), (2, second)):
        for mine, its in zip(of.model[at].parameters(), eager.model[at].parameters(), strict=True):
            assert torch.equal(mine, its)
    for end in (*ends, *running):
        end.close()


@pytest.fixture
def begun(worker, started):
    """Makes an executor whose arrivals the test decides about, its channel, and the part that it runs."""

    def make(kind, runs_ahead=False, runs_behind=False):
        _, part = worker
        channel = ManualChannel(runs_ahead, runs_behind)
        plan = plan_of(part, "worker0", "server")
        return started(part, plan, kind=kind, channels=both_ways("worker0", "server", channel)), channel, part

    return make


def expect_end(thread, found):
    """The step of a thread ends, with a result."""
    thread.join(20)
    assert isinstance(found[0], torch.Tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_may_be_delivered_one_step_behind_and_no_later(begun, kind):
    planned, channel, part = begun(kind, runs_behind=True)
    sends = [op.name for op in part.graph.ops if op.role == "send"]
    thread, found = in_thread(lambda: planned(BATCHES[0]))
    arrive(channel, part, 1, "recv")
    expect_end(thread, found)  # and nothing was delivered
    thread, found = in_thread(lambda: planned(BATCHES[1]))
    arrive(channel, part, 2, "recv")
    for op in sends:
        channel.wait_for(op, 2)
    thread.join(0.1)  # a step that does not wait has the time to end
    assert thread.is_alive()
    arrive(channel, part, 1, "send")
    expect_end(thread, found)
    arrive(channel, part, 2, "send")
    assert {span.op for span in planned.timeline().spans} == set(part.graph.by_name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_send_that_fails_behind_its_step_ends_the_next_one(begun, kind):
    planned, channel, part = begun(kind, runs_behind=True)
    send = next(op.name for op in part.graph.ops if op.role == "send")
    thread, found = in_thread(lambda: planned(BATCHES[0]))
    arrive(channel, part, 1, "recv")
    expect_end(thread, found)
    channel.fail(send, 1, ConnectionResetError("the peer is gone"))
    fails(ExecutionError, rf"channel op '{send}' to 'server' failed: .*the peer is gone", planned, BATCHES[1])


@pytest.mark.parametrize("kind", KINDS)
def test_an_arrival_may_come_one_step_ahead_and_not_before_its_memory_is_free(begun, kind):
    planned, channel, part = begun(kind, runs_ahead=True)
    recvs = [op.name for op in part.graph.ops if op.role == "recv"]
    thread, found = in_thread(lambda: planned(BATCHES[0]))
    for op in recvs[1:]:
        channel.arrive(op, 1)
    time.sleep(0.02)  # who begins too early has the time to
    assert not [key for key in channel.begun if key[1] == 2], "the first layer, and all others with it, waits still"
    channel.arrive(recvs[0], 1)
    for op in recvs:
        channel.wait_for(op, 2)  # of the next step, before this one has ended
    for op in recvs:
        channel.arrive(op, 2)
    assert thread.is_alive(), "gradients are on their way"
    arrive(channel, part, 1, "send")
    expect_end(thread, found)
    thread, found = in_thread(lambda: planned(BATCHES[1]))
    arrive(channel, part, 2, "send")
    expect_end(thread, found)


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_are_begun_in_the_order_of_their_lane(begun, kind):
    planned, channel, part = begun(kind)
    thread, _ = in_thread(lambda: planned(BATCHES[0]))
    arrive(channel, part, 1, "recv")
    arrive(channel, part, 1, "send")
    thread.join(20)
    for role in ("recv", "send"):
        expected = [op.name for op in part.graph.ops if op.role == role]
        assert [op for op, _ in channel.begun if op in expected] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["recv", "send"])
def test_a_channel_that_fails_ends_the_step_and_names_op_and_peer(begun, kind, role):
    planned, channel, part = begun(kind)
    thread, found = in_thread(lambda: planned(BATCHES[0]))
    op = [op.name for op in part.graph.ops if op.role == role][1]
    if role == "send":
        arrive(channel, part, 1, "recv")
    channel.fail(op, 1, ConnectionResetError("the peer is gone"))
    thread.join(20)
    way = "from" if role == "recv" else "to"
    message = f"channel op '{op}' {way} 'server' failed: ConnectionResetError: the peer is gone"
    assert isinstance(found[0], ExecutionError)
    assert str(found[0]) == message
    fails(ExecutionError, "the peer is gone", planned, BATCHES[1])


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_of_a_lane_may_arrive_in_any_order(worker, begun, kind):
    found, part = worker
    other = twin(found)
    for parameter in other.model.parameters():
        parameter.data.mul_(0.5)
    planned, channel, _ = begun(kind)
    thread, results = in_thread(lambda: planned(BATCHES[0]))
    recvs = all_begun(channel, part)
    named = dict(other.model.named_parameters())
    for op in reversed(recvs):
        time.sleep(0.02)  # whoever starts too early has the time to
        channel.arrive(op, 1, named[op.partition(":")[2]].detach())
    arrive(channel, part, 1, "send")
    thread.join(20)
    x, y = BATCHES[0]
    assert torch.equal(results[0], torch.nn.functional.mse_loss(other.model(x), y))


def states() -> dict[str, str]:
    """State of each thread of this process: R runs, S sleeps."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            found[task.name] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_an_arrival_sleeps(begun, kind):
    planned, channel, part = begun(kind)
    thread, _ = in_thread(lambda: planned(BATCHES[0]))
    channel.wait_for("recv:0.weight", 1)
    mine = str(threading.get_native_id())
    deadline = time.monotonic() + 20
    quiet = 0
    while quiet < 20 and time.monotonic() < deadline:  # twenty looks in a row at which everybody else sleeps
        quiet = quiet + 1 if all(state == "S" for task, state in states().items() if task != mine) else 0
        time.sleep(0.005)
    assert quiet == 20
    arrive(channel, part, 1, "recv")
    arrive(channel, part, 1, "send")
    thread.join(20)


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_and_channels_that_do_not_fit(worker, kind):
    _, part = worker
    plan = plan_of(part, "worker0", "server")
    fails(ExecutionError, "lane 'in': there is no channel for 'server->worker0'", executor, part, plan, kind=kind)
    everything = Plan((Lane("lane", part.graph.order),))
    with pytest.raises(ExecutionError, match=r"'recv:0\.weight' is a transfer, and lane 'lane' is of kind cores"):
        executor(part, everything, kind=kind)
