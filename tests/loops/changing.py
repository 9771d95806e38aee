"""Random programs with random changes between their steps, as source text. See `loops.fuzz_changes`."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from loops.changing_tasks import TOP, Step, step_of
from loops.loop import Loop
from loops.step_changes import CHANGES, Change

# Options of a program's schedule by name, the share of programs that have them in tenths, and the number of calls.
SETTINGS: tuple[tuple[str, int, int], ...] = (
    ("serial", 5, 30),
    ("lanes", 2, 34),
    ("close", 2, 40),
    ("default", 1, 110),
)
MAX_CHANGES = 6
_LINEAR_FORWARD = nn.Linear.forward


def reset_switches() -> None:
    """Set all of torch's switches that a change may have set, as they are in a new process."""
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.enabled = True
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_flush_denormal(False)
    torch.set_default_device(None)
    torch.set_float32_matmul_precision("highest")
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_cache_enabled(True)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    nn.Linear.forward = _LINEAR_FORWARD
    for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        hooks.clear()
    torch_optimizer._global_optimizer_post_hooks.clear()


@dataclass(frozen=True)
class ChangingProgram:
    """One program.

    Attributes:
        setting: how it is scheduled. See `SETTINGS`.
        num_calls: of the step.
        events: changes and what undoes them, by the number of the call that they follow.
    """

    seed: int
    setting: str
    num_calls: int
    step: Step
    events: tuple[tuple[int, tuple[str, ...]], ...]
    rounds: bool

    @property
    def source(self) -> str:
        names = ["kept", "flat", "size", "dropped", "saved", "kept_act", "kept_b", "kept_a"]
        inside = [
            *self.step.declare,
            f"{' = '.join(names)} = None",
            "handles, around, alter = [], {}, {}",
            "linear_forward = nn.Linear.forward",
            "first_net, first_optimizer = net, optimizer",
            "",
            "def halved_linear(self, x):",
            "    return 0.5 * F.linear(x, self.weight, self.bias)",
            "",
            "def step(batch):",
            "    nonlocal k, h",
            *_indented(self.step.step),
            "",
            "def after(n, result):",
            f"    nonlocal {', '.join((*self.step.outer, *names))}",
            *_indented(self.step.after),
            *_indented(line for n, lines in self.events for line in (f"if n == {n}:", *_indented(_split(lines)))),
            "",
            "def batches(n):",
            "    made = data[n % 5]",
            "    return alter['batch'](*made) if 'batch' in alter else made",
            "",
            "@contextlib.contextmanager",
            "def entered(n):",
            "    with contextlib.ExitStack() as stack:",
            "        if 'enter' in around:",
            "            around['enter'](stack)",
            "        yield",
            "",
            "def state():",
            "    places = {**dict(net.named_parameters()), **dict(net.named_buffers()), 'net.k': vars(net).get('k')}",
            "    return {'s': s, 'box': vars(box), 'items': items, 'k': k, 'h': h, 'net': places}",
            "",
            "return Loop(step, first_net, first_optimizer, batches, state, after, (), reset_switches, entered)",
        ]
        return "\n".join([TOP, "", "def build():", *_indented(inside)]) + "\n"

    def build(self) -> Loop:
        """Execute the source in a module of its own, and build the loop."""
        name = f"<changing program {self.seed}>"
        source = self.source
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": f"changing_program_{self.seed}"}
        exec(compile(source, name, "exec"), space)
        return space["build"]()


def changing_program(seed: int) -> ChangingProgram:
    """The program of this seed."""
    rng = Random(seed)
    names = [name for name, share, _ in SETTINGS for _ in range(share)]
    setting = names[seed % len(names)]
    num_calls = next(calls for name, _, calls in SETTINGS if name == setting)
    step = step_of(rng)
    events: list[tuple[int, tuple[str, ...]]] = []
    rounds = False
    # Not while the first steps are watched in most of the programs: they would never be captured.
    earliest = rng.choice((0, 8, num_calls // 2, num_calls // 2))
    for _ in range(rng.randrange(1, MAX_CHANGES)):
        change: Change = rng.choice(CHANGES)(rng, step.number)
        start = rng.randrange(earliest, num_calls - 2)
        events.append((start, change.do))
        rounds |= change.rounds
        length = rng.choice((1, 1, 2, 3, 5, 8))
        if change.undo and rng.random() < 0.75:
            events.append((start + length, change.undo))
            if rng.random() < 0.4:
                events.append((start + 2 * length, change.do))
                events.append((start + 3 * length, change.undo))
    return ChangingProgram(seed, setting, num_calls, step, tuple(sorted(events, key=lambda event: event[0])), rounds)


def _split(lines: Iterable[str]) -> list[str]:
    return [line for text in lines for line in text.splitlines()]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]
