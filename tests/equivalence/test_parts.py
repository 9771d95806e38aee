"""Two parts of a captured step that exchange values compute what the whole does, bit for bit, however it is divided.

Ops are divided at random. Where `cut` refuses a part, the ops that it names go to the same side, until nothing is left
to refuse: so this is also a test that what is refused is all that has to be.
"""

import random
import re
import threading

import pytest
import torch
from torch.utils._pytree import tree_flatten

from equivalence.test_zoo import load
from execution.probe import KINDS
from hocket import capture
from hocket.checking import check, hazards
from hocket.errors import InputError
from hocket.execution import executor
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.tracing.cut import Arrival, Departure, cut
from quick import covering

NUM_STEPS = 3

MORE = ["lenet", "lstm-lm", "transformer", "bert-tiny", "dcgan", "pointnet-cls", "resnet20"]
CASES = [
    *((model, optimizer, 0) for model, optimizer in (("mlp", "adam"), ("lstm-cells", "sgd"), ("digits-cnn", "adam"))),
    *(
        pytest.param(model, optimizer, seed, marks=pytest.mark.slow)
        for model in ("mlp", "lstm-cells", "digits-cnn", *MORE)
        for optimizer, seed in (("sgd", 1), ("adamw", 2))
    ),
]


class Exchange:
    """A channel from one part to the other: the second of the two to arrive moves the value.

    What a step leaves in `for_the_next` is what the next one begins with.
    """

    runs_ahead = True
    runs_behind = False

    def __init__(self, for_the_next: set[str]) -> None:
        self.for_the_next = for_the_next
        self.waiting: dict = {}
        self.lock = threading.Lock()

    def begin(self, op, tensor, epoch, done) -> None:
        way, _, buffer = op.partition(":")
        if way == "send" and buffer in self.for_the_next:
            epoch += 1
        with self.lock:
            if (buffer, epoch) not in self.waiting:
                held = tensor.clone() if way == "send" else tensor
                self.waiting[buffer, epoch] = (held, done)
                if way == "send":
                    done(None)
                return
            other, other_done = self.waiting.pop((buffer, epoch))
        source, target = (tensor, other) if way == "send" else (other, tensor)
        target.copy_(source)
        done(None)
        if way == "send":
            other_done(None)


class Sides:
    """The side of each op; those that belong together move together."""

    def __init__(self, names: tuple[str, ...], chance: random.Random) -> None:
        self.group = {name: [name] for name in names}
        self.side = {name: chance.randrange(2) for name in names}

    def join(self, names: list[str]) -> None:
        members = list(dict.fromkeys(member for name in names for member in self.group[name]))
        for member in members:
            self.group[member] = members
            self.side[member] = self.side[names[0]]


def crossings(graph, sides: Sides) -> list[tuple[str, int]]:
    """The buffers that one side writes and the other touches, and the side that writes them."""
    writers: dict[str, set[int]] = {}
    touching: dict[str, set[int]] = {}
    for op in graph.ops:
        for buffer in dict.fromkeys((*op.reads, *op.writes)):
            touching.setdefault(buffer, set()).add(sides.side[op.name])
        for buffer in op.writes:
            writers.setdefault(buffer, set()).add(sides.side[op.name])
    return [(buffer, *owners) for buffer, owners in writers.items() if len(owners) == 1 and len(touching[buffer]) == 2]


def used_before_written(graph, owner: dict[str, int], sides: Sides) -> set[str]:
    """Uses of lasting memory by the other side before its owner writes it."""
    lasting = {buffer.name for buffer in graph.buffers if buffer.life == "lasting"}
    found, written = set(), set()
    for op in graph.ops:
        found |= {
            b for b in lasting.intersection(op.reads) - written if owner.get(b) not in (None, sides.side[op.name])
        }
        written.update(op.writes)
    return found


def part_of(captured, sides: Sides, side: int):
    moved = crossings(captured.graph, sides)
    arrivals = [Arrival(f"recv:{buffer}", buffer, "other") for buffer, owner in moved if owner != side]
    departures = [Departure(f"send:{buffer}", buffer, "other") for buffer, owner in moved if owner == side]
    return cut(captured, [name for name, at in sides.side.items() if at == side], arrivals, departures)


def divided(twins, chance: random.Random):
    """Two parts of a step that `cut` makes, one of each twin, and the ops' sides."""
    graph = twins[0].graph
    sides = Sides(graph.order, chance)
    makers = {buffer: op.name for op in graph.ops for buffer in op.writes if buffer.startswith(f"{op.name}:")}
    while True:
        try:
            return [part_of(captured, sides, side) for side, captured in enumerate(twins)], sides
        except InputError as refused:
            error = refused
        words = re.findall(r"'([^']+)'", str(error))
        ops = [name for word in words if (name := makers.get(word, word)) in graph.by_name]
        about = {*words, *(buffer for buffer, maker in makers.items() if maker in ops)}
        touching = [op.name for op in graph.ops if about.intersection((*op.reads, *op.writes))]
        before = len({id(group) for group in sides.group.values()})
        sides.join(ops)
        if len({id(group) for group in sides.group.values()}) == before:
            sides.join([*ops, *touching])  # ops that are not named belong to it, too
        assert len({id(group) for group in sides.group.values()}) < before, error


def plan_of(part, me: str, chance: random.Random, cores: int = 2) -> Plan:
    lanes: list[list[str]] = [[] for _ in range(cores)]
    moves: dict[str, list[str]] = {"recv": [], "send": []}
    # In the order of the program, or the two sides wait for what the other begins after what it waits for itself.
    place = {op.name: at for at, op in enumerate(part.graph.ops)}
    for name in place:
        moves.get(part.graph[name].role, chance.choice(lanes)).append(name)
    chance.shuffle(moves["recv"])
    # Receives that wait for the last readers of their memory come in program order, after all others.
    moves["recv"].sort(key=lambda name: place[name] if part.graph.predecessors[name] else -1)
    moves["send"].sort(key=lambda name: max([place[before] for before in part.graph.predecessors[name]]))
    made = [Lane(f"lane{n}", tuple(ops)) for n, ops in enumerate(lanes) if ops]
    made.append(Lane("in", tuple(moves["recv"]), "channel", f"other->{me}"))
    made.append(Lane("out", tuple(moves["send"]), "channel", f"{me}->other"))
    return Plan(tuple(made))


def in_parallel(calls) -> list:
    """Run all calls at once and return their results, or raise the first error."""
    found: list = [None] * len(calls)

    def run(number, call):
        try:
            found[number] = call()
        except BaseException as error:  # noqa: BLE001 (raised below)
            found[number] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the parts wait for each other"
    for value in found:
        if isinstance(value, BaseException):
            raise value
    return found


@pytest.mark.parametrize(("model", "optimizer", "seed", "kind"), covering(CASES, KINDS))
def test_two_parts_of_any_step_compute_what_the_whole_does(model, optimizer, seed, kind):
    chance = random.Random(f"{model} {seed}")
    jobs = [load(model, optimizer=optimizer) for _ in range(3)]
    whole, *twins = [captured_of(job) for job in jobs]
    parts, sides = divided(twins, chance)
    moved = crossings(whole.graph, sides)
    assert moved, "nothing crosses"
    exchange = Exchange(used_before_written(whole.graph, dict(moved), sides))
    for buffer, owner in moved:
        if buffer in exchange.for_the_next:
            exchange.waiting[buffer, 1] = (twins[owner].program.inputs[slot_of(whole, buffer)].get().clone(), None)
    running = []
    for part, me in zip(parts, ("first", "second"), strict=True):
        plan = plan_of(part, me, chance)
        check(part.graph, plan)
        hazards(part.graph, plan)
        channels = {f"other->{me}": exchange, f"{me}->other": exchange}
        running.append(executor(part, plan, kind=kind, channels=channels))
    serial = ThreadLanes(whole, Plan((Lane("lane", whole.graph.order),)))
    for number in range(NUM_STEPS):
        batch = jobs[0].batch(number)
        random_state = torch.get_rng_state()
        expected, _ = tree_flatten(serial(batch))
        torch.set_rng_state(random_state)  # all draws are on one side
        found = in_parallel([lambda run=run, batch=batch: run(batch) for run in running])
        for leaves in zip(expected, *(tree_flatten(one)[0] for one in found), strict=False):
            assert any(isinstance(leaf, torch.Tensor) for leaf in leaves[1:])
            assert all(torch.equal(leaves[0], leaf) for leaf in leaves[1:] if leaf is not None)
    compare(whole, parts, sides)
    for one in (*running, serial):
        one.close()


def captured_of(job):
    torch.manual_seed(0)  # twins draw alike
    job.step(job.batch(0))
    return capture(job.step, job.model, job.optimizer, job.batch(0))


def slot_of(captured, buffer: str) -> int:
    return next(slot for slot, source in captured.program.inputs.items() if source.name == buffer)


def compare(whole, parts, sides: Sides) -> None:
    """Each tensor that outlives the step, on the side that writes it; each gradient where it is made."""
    owner = {buffer: sides.side[op.name] for op in whole.graph.ops for buffer in op.writes}
    for name, value in whole.state().items():
        for part in parts if name not in owner else [parts[owner[name]]]:
            assert torch.equal(value, part.state()[name]), name
    made = [0, 0]
    for gradient in whole.trace.gradients:
        for side, part in enumerate(parts):
            mine = next(g for g in part.trace.gradients if g.name == gradient.name)
            if mine.get() is not None:
                made[side] += 1
                assert torch.equal(mine.get(), gradient.get()), gradient.name
    assert sum(made) >= len([g for g, node in whole.trace.gradients.items() if node is not None])
    for entry in whole.trace.numbers:
        for part in parts:
            for mine in part.trace.numbers:
                if mine.name == entry.name:
                    assert mine.get() == entry.get(), entry.name
