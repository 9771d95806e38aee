"""Each change of `loops.step_changes` between two calls of a planned step: every call is as eager's, and planned again.

A program has a few of them, each with what undoes it some calls later. `loops.fuzz_changes` mixes them at random.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loops.changing import ChangingProgram
from loops.changing_tasks import Step, declared
from loops.fuzz_changes import faults, options_of, report, run
from loops.step_changes import change_of, tables
from quick import some

AT, LENGTH, REST = 16, 3, 9  # the plan stands by call 14
BODY = (
    *("x, y = batch", "s['calls'] = (s.get('calls') or 0) + 1", "k = s.get('k', 0.25)", "h = s.get('h')"),
    *("scale = 1.0 if k is None else float(k) if isinstance(k, str) else 2.0 if isinstance(k, int) else k",),
    *("out = net(x, h) * scale", "loss = {loss}", "if s.get('fail'):", "    raise RuntimeError('asked to fail')"),
    *("if s.get('log'):", "    s['seen'].append(loss.item())", "optimizer.zero_grad()", "loss.backward()"),
    *("optimizer.step()", "s['h'] = 0.9 * out.detach().mean() + torch.zeros(hidden_shape)", "return loss, out"),
)
STEPS = {
    "MLP": ("torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=False)", "F.mse_loss(out, y)"),
    "Conv": ("torch.optim.Adam(net.parameters(), lr=0.01)", "F.cross_entropy(out, y)"),
}


def step_of(model: str) -> Step:
    optimizer, loss = STEPS[model]
    body = tuple(line.replace("{loss}", loss) for line in BODY)
    return Step(model, "s['k']", tuple(declared(model, optimizer)), body, ())


def programs(each: int = 4) -> Iterator[tuple[str, ChangingProgram]]:
    """Programs with a number of changes of one kind, by name."""
    for kind, pairs in tables().items():
        for place in range(0, len(pairs), each):
            number = place // each
            events, calls = [], AT
            for pair in pairs[place : place + each]:
                change = change_of(pair, ("net.a", "net.b")[number % 2])
                events += [(calls, change.do), *([(calls + LENGTH, change.undo)] if change.undo else [])]
                calls += REST
            model = list(STEPS)[number % 2]
            made = ChangingProgram(number, "serial", calls, step_of(model), tuple(events), rounds=False)
            yield f"{kind} {number}", made


@pytest.mark.parametrize(("name", "program"), some(programs(), 5))
def test_each_call_is_eager_s_after_a_change_and_when_it_is_undone(name, program):
    if faults(program):
        pytest.fail(f"{name}: {report(program)}", pytrace=False)


@pytest.mark.parametrize("model", STEPS)
def test_the_step_is_planned_when_the_first_change_comes(model):
    program = ChangingProgram(1, "serial", AT, step_of(model), (), rounds=False)
    assert run(program, options_of("serial")).verdict.startswith("planned")
