"""Pieces of random training programs: some state each, how the step uses it, and what changes it.

A piece is a few lines of source for each part of a program. Numbers stay between 0 and 2, so that no loss runs away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random


@dataclass
class Piece:
    """Lines of source, by the part of the program they belong to.

    Attributes:
        module, declare: at the top level, and in the function that builds the loop.
        before, loss, gradients, end: in the step: before the model, after the loss, after backward, after the update.
        after: between steps; `n` is the number of the step, `result` what it returned.
        state: expressions of what has to be equal at the end, by name.
        nonlocals, globals: names that the step or the code between steps binds.
        planned: the step stays pure and can be a graph, and nothing it reads changes after step 30.
    """

    module: list[str] = field(default_factory=list)
    declare: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    loss: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    nonlocals: list[str] = field(default_factory=list)
    globals: list[str] = field(default_factory=list)
    planned: bool = False


# Where a number may live: lines at the top level, lines in the builder, how it is read, how it is written.
NUMBERS: dict[str, tuple[str, str, str, str]] = {
    "cell": ("", "v{k} = {init}", "v{k}", "v{k} = {value}"),
    "global": ("v{k} = {init}", "", "v{k}", "v{k} = {value}"),
    "attribute": ("", "v{k} = Box({init})", "v{k}.x", "v{k}.x = {value}"),
    "slot": ("", "v{k} = Slot({init})", "v{k}.x", "v{k}.x = {value}"),
    "item": ("", "v{k} = {{'x': {init}}}", "v{k}['x']", "v{k}['x'] = {value}"),
    "element": ("", "v{k} = [None, {init}]", "v{k}[1]", "v{k}[1] = {value}"),
    "deep": ("", "v{k} = {{'a': [Box({init})]}}", "v{k}['a'][0].x", "v{k}['a'][0].x = {value}"),
    "class": ("class V{k}:\n    x = {init}", "", "V{k}.x", "V{k}.x = {value}"),
    "function": ("def v{k}():\n    pass\nv{k}.x = {init}", "", "v{k}.x", "v{k}.x = {value}"),
    "default": ("def v{k}(x=[{init}]):\n    return x", "", "v{k}()[0]", "v{k}()[0] = {value}"),
    "array": ("", "v{k} = np.array([{init}])", "float(v{k}[0])", "v{k}[0] = {value}"),
    "model": ("", "model.v{k} = {init}", "model.v{k}", "model.v{k} = {value}"),
    "layer": ("", "model[0].v{k} = {init}", "model[0].v{k}", "model[0].v{k} = {value}"),
    "optimizer": ("", "optimizer.v{k} = {init}", "optimizer.v{k}", "optimizer.v{k} = {value}"),
    "context": ("v{k} = contextvars.ContextVar('v{k}')", "v{k}.set({init})", "v{k}.get()", "v{k}.set({value})"),
    "environment": (
        "",
        "os.environ['LOOPS_V{k}'] = '{init}'",
        "float(os.environ['LOOPS_V{k}'])",
        "os.environ['LOOPS_V{k}'] = str({value})",
    ),
}


def branches(rng: Random, test: str, line: str) -> list[str]:
    """The line, perhaps only if `test`."""
    return [f"if {test}:", f"    {line}"] if rng.random() < 0.5 else [line]


def times(rng: Random) -> tuple[str, bool]:
    """When the code between steps acts; and whether it is at rest after step 30."""
    kind = rng.randrange(4)
    if kind < 2:
        return f"n == {rng.randrange(8, 30)}", True
    return (f"n % {rng.randrange(2, 9)} == 1", False) if kind == 2 else (f"n > {rng.randrange(5, 40)}", False)


def used(rng: Random, piece: Piece, read: str) -> None:
    """Let the step use a number."""
    limit = round(rng.uniform(0.3, 1.7), 1)
    kind = rng.randrange(7)
    if kind == 0:
        piece.before.append(f"x = x * {read}")
    elif kind == 1:
        piece.before.append(f"x = x.flip(0) if {read} > {limit} else x")
    elif kind == 2:
        piece.loss.append(f"loss = loss * (0.5 + {read})")
    elif kind == 3:
        piece.loss += [f"if {read} > {limit}:", "    loss = loss + 0.01 * model[0].weight.square().sum()"]
    elif kind == 4:
        piece.gradients.append("grads = [p.grad for p in model.parameters() if p.grad is not None]")
        piece.gradients.append(f"torch._foreach_mul_(grads, 0.1 + {read})")
    elif kind == 5:
        piece.end += ["with torch.no_grad():", f"    model[0].bias.mul_(1 - 0.01 * {read})"]
    else:
        piece.end.append(f"further.append({read})")


def number(rng: Random, k: int) -> Piece:
    """A number somewhere, used by the step, and written inside or outside of it."""
    place = rng.choice(list(NUMBERS))
    top, declare, read, write = (text.replace("{k}", str(k)) for text in NUMBERS[place])
    init = rng.choice(["1.0", "0.5", "0.25"])
    piece = Piece(state={f"v{k}": read}, planned=True)
    piece.module = [top.format(init=init)] if top else []
    piece.declare = [declare.format(init=init)] if declare else []
    if place == "cell":
        piece.nonlocals.append(f"v{k}")
    elif place == "global":
        piece.globals.append(f"v{k}")
    if rng.random() < 0.85:
        used(rng, piece, read)
    values = [f"{read} * 0.9 + 0.1", f"({read} + 0.25) % 2.0", f"2.0 - {read}"]
    where = rng.random()
    if where < 0.45:
        values += ["min(loss.item(), 2.0)", "float(loss.detach().clamp(0, 2))"]
        value = rng.choice(values)
        part = rng.choice([piece.loss, piece.end]) if "loss" not in value else piece.end
        part += branches(rng, rng.choice([f"{read} < 1.5", "float(y[0, 0]) > 0"]), write.format(value=value))
        piece.planned = False
    elif where < 0.85:
        when, rests = times(rng)
        value = rng.choice([*values, "(n % 5) / 4"])
        piece.after += [f"if {when}:", f"    {write.format(value=value)}"]
        piece.planned = rests and place != "environment"
    return piece


def counter(rng: Random, k: int) -> Piece:
    """Something else every few steps, by a whole number that the step counts up."""
    place = rng.choice([name for name in NUMBERS if name not in ("array", "environment")])
    top, declare, read, write = (text.replace("{k}", str(k)) for text in NUMBERS[place])
    piece = Piece(state={f"v{k}": read})
    piece.module = [top.format(init=0)] if top else []
    piece.declare = [declare.format(init=0)] if declare else []
    (piece.nonlocals if place == "cell" else piece.globals if place == "global" else []).append(f"v{k}")
    test = rng.choice([f"{read} % {rng.randrange(2, 12)} == 0", f"{read} > {rng.randrange(20, 50)}"])
    piece.loss += [f"if {test}:", "    loss = loss * 1.5"]
    piece.end.append(write.format(value=f"{read} + 1"))
    return piece


def tensor(rng: Random, k: int) -> Piece:
    """A tensor that is carried along: rebound, or written in place."""
    read = rng.choice([f"t{k}", f"t{k}['t']", f"t{k}.x", f"model.t{k}"])
    made = "torch.full((4,), 0.5)"
    declare = {
        f"t{k}": f"t{k} = {made}",
        f"t{k}['t']": f"t{k} = {{'t': {made}}}",
        f"t{k}.x": f"t{k} = Box({made})",
        f"model.t{k}": rng.choice([f"model.t{k} = {made}", f"model.register_buffer('t{k}', {made})"]),
    }[read]
    piece = Piece(declare=[declare], state={f"t{k}": read}, planned=True)
    if read == f"t{k}":
        piece.nonlocals.append(read)
    if rng.random() < 0.8:
        piece.before.append(rng.choice([f"x = x * {read}", f"x = x + {read}"]))
    if rng.random() < 0.5:
        piece.end.append(
            rng.choice(
                [
                    f"{read} = 0.9 * {read} + 0.1 * x.detach().mean(0).clamp(0, 1)",
                    f"{read}.lerp_(x.detach().mean(0).clamp(0, 1), 0.1)",
                    f"{read}.mul_(0.99)",
                ]
            )
        )
        piece.planned = False
    else:
        when, rests = times(rng)
        line = rng.choice([f"{read} = torch.full((4,), (n % 4) / 4)", f"{read}.mul_(0.9)", f"{read}[n % 4] = 0.75"])
        piece.after += [f"if {when}:", f"    {line}"]
        piece.planned = rests
    return piece


def container(rng: Random, k: int) -> Piece:
    """Something that grows, and may be read back."""
    made, line, size = rng.choice(
        [
            (f"c{k} = []", f"c{k}.append({{value}})", f"len(c{k})"),
            (f"c{k} = deque(maxlen=5)", f"c{k}.append({{value}})", f"len(c{k})"),
            (f"c{k} = {{}}", f"c{k}[len(c{k})] = {{value}}", f"len(c{k})"),
            (f"c{k} = Box([])", f"c{k}.x.append({{value}})", f"len(c{k}.x)"),
            (f"c{k} = Counter()", f"c{k}.update([int(y.shape[0])])", f"sum(c{k}.values())"),
        ]
    )
    value = rng.choice(["loss.item()", "loss.detach()", "1", "'step'", "float(loss.detach())", "x.detach().mean()"])
    name = f"c{k}.x" if "Box" in made else f"c{k}"
    piece = Piece(declare=[made], state={f"c{k}": name})
    if rng.random() < 0.4:
        piece.loss += [f"if {size} % 3 == 2:", "    loss = loss * 0.5"]
    piece.end += branches(rng, "loss.item() < 1", line.format(value=value))
    if rng.random() < 0.3:
        piece.after += ["if n % 20 == 19:", f"    {name}.clear()"]
    return piece


DRAWS = {
    "random.random()": "",
    "r{k}.random()": "r{k} = random.Random({k})",
    "np.random.rand()": "",
    "float(r{k}.random())": "r{k} = np.random.default_rng({k})",
    "torch.rand(())": "",
    "torch.rand((), generator=r{k})": "r{k} = torch.Generator().manual_seed({k})",
    "next(r{k})": "r{k} = itertools.cycle([0.5, 1.0, 0.25])",
    "(next(r{k}) % 3 / 2)": "r{k} = itertools.count()",
    "next(r{k}) ": "r{k} = (n % 4 / 3 for n in range(10 ** 6))",
}


def draw(rng: Random, k: int) -> Piece:
    """The next number of some generator."""
    text = rng.choice(list(DRAWS))
    read, declare = text.replace("{k}", str(k)), DRAWS[text].replace("{k}", str(k))
    piece = Piece(declare=[declare] if declare else [], planned=text == "torch.rand(())")
    if any(word in declare for word in ("Random", "default_rng", "Generator")):
        piece.state[f"r{k}"] = f"r{k}"
    piece.before.append(f"drawn{k} = {read}")
    tests = [f"x = x * drawn{k}"] if piece.planned else [f"x = x * drawn{k}", f"x = x.flip(1) if drawn{k} < 0.5 else x"]
    piece.before.append(rng.choice(tests))
    return piece


def disturbance(rng: Random, k: int) -> Piece:
    """The code between steps draws from a generator, or seeds it."""
    when, _ = times(rng)
    line = rng.choice(
        ["random.random()", "np.random.rand()", "torch.rand(2)", "torch.manual_seed(n)", "random.seed(n)"]
    )
    return Piece(after=[f"if {when}:", f"    {line}"], planned=True)


def change(rng: Random, k: int) -> Piece:
    """The code between steps changes the model or the optimizer, once."""
    line = rng.choice(
        [
            "optimizer.param_groups[0]['lr'] = 0.01",
            "optimizer.param_groups[0]['weight_decay'] = 0.1",
            "model[0].weight.requires_grad_(False)",
            "model.eval()",
            "model[1] = nn.Tanh()",
            "model[0].register_forward_hook(lambda module, args, out: 0.5 * out)",
            "model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))",
            "optimizer.zero_grad(set_to_none=False)",
            "model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})",
            "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
            "optimizer.state.clear()",
            "model[0].bias.data = torch.zeros(4)",
        ]
    )
    return Piece(after=[f"if n == {rng.randrange(8, 30)}:", f"    {line}"], planned=True)


def hook(rng: Random, k: int) -> Piece:
    """A hook from the start, which reads or writes Python state."""
    piece = Piece(declare=[f"h{k} = {{'x': 1.0, 'seen': []}}"], state={f"h{k}": f"h{k}"})
    if rng.random() < 0.5:
        piece.declare.append(f"model[0].register_forward_hook(lambda module, args, out: out * h{k}['x'])")
        when, rests = times(rng)
        piece.after += [f"if {when}:", f"    h{k}['x'] = 0.5 + n % 2"]
        piece.planned = rests
    else:
        piece.declare.append(
            f"model[0].weight.register_hook(lambda grad: h{k}['seen'].append({rng.choice(['1', 'grad.sum().item()'])}))"
        )
    return piece


# By how often they occur.
_KINDS: list[tuple[int, Callable[[Random, int], Piece]]] = [
    (8, number),
    (3, counter),
    (4, tensor),
    (3, container),
    (4, draw),
    (1, disturbance),
    (4, change),
    (2, hook),
]


def _pieces() -> Iterator[Callable[[Random, int], Piece]]:
    for weight, kind in _KINDS:
        yield from [kind] * weight


PIECES = tuple(_pieces())
