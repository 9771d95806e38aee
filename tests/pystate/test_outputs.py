"""Calls that show something show the same as sinks, whatever form their text has."""

import io
import json
import linecache
import logging
import math
import os
import sys
from collections import deque

import pytest
import torch

from hocket.pystate.bodies import parsed
from hocket.pystate.exchange import Exchange
from hocket.sinks import sinks_held

STATEMENTS = [
    "print()",
    "print('loss', n, x, flush=True)",
    "print(f'{x:.3f} {n:>5} {loss:.4f} {loss} {word!r:>8} {x:{width}.{n}f}')",
    "print('%d: %.2f %s' % (n, x, word), '%.3f' % loss, '%s' % word, '%5.1f%%' % x)",
    "print('{:.3f} {}'.format(loss, word), '{0:>4}|{b:<6}|'.format(n, b=x), '{0!r} {1.real}'.format(word, n))",
    "print('a' + str(n) + f'{x:.1f}' + 'b', n + 1, -x, str(round(x, 2)), sep='; ', end='!\\n')",
    "print(*[n, x], *'ab', **{'sep': '-'})",
    "print([n, x], (word,), {'n': n, 'text': f'{x:.2f}'}, {1, 1}, None, True, sep='|')",
    "print(f'{f\"{x:.1f}\"} {n if n > 2 else x} {[i for i in range(n)]}', file=sys.stdout)",
    "print(form.format(x, n), form.format(word, 1), json.dumps({'n': n, 'x': x}, indent=1), math.exp(x), max(n, x))",
    "print(f'ppl {math.exp(loss.item()):.2f}', min([n, 1]), int(x), abs(-x), repr(word), len(word), float(loss))",
    "print('%(a)d %(b)s' % {'a': n, 'b': word}, '%*d' % (5, n), '%.*f' % (2, x), '%d%% %c %e' % (x, n + 60, loss))",
    "log.info('%s: %.3f at %d of %5.1f', word, loss, x, x)",
    "log.log(20, 'n %d', n)",
    "sys.stdout.write(f'{x:.2f} of {n}\\n')",
    "print(os.path.join('runs', word), 'saved')",
    "print(', '.join(f'{each:.1f}' for each in (x, n)), ','.join(['a', 'b']))",
    "print(walrus := n, walrus)",
    "kept.append(x)",
    "kept.extend([n, x])",
]
GIVEN = {"n": 3, "x": 2.71828, "word": "it's", "width": 9, "loss": torch.tensor(0.123456789), "kept": deque(maxlen=3)}
LOG = logging.Logger("shown", logging.INFO)
LOG.addHandler(logging._StderrHandler())  # which looks for the stream at each call
NAMES = {"os": os, "sys": sys, "math": math, "json": json, "form": "{} of {:>3}", "log": LOG}


def made_of(lines, **outside):
    """The function of these lines, and one with sinks in place of what shows."""
    file = f"<shown {hash(lines)}>"
    source = "def step(n, x, word, width, loss):\n" + "".join(f"    {line}\n" for line in lines)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    found = {**NAMES, **outside}
    exec(compile(source, file, "exec"), found)
    body = parsed(found["step"], None)
    shown = Exchange(body, [each.node for each in body.statements])
    return found["step"], body.compiled(shown.nodes, ()), shown


def run(function, monkeypatch):
    out, kept = io.StringIO(), GIVEN["kept"]
    kept.clear()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    function(*(value for name, value in GIVEN.items() if name != "kept"))
    return out.getvalue(), list(kept)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_same_is_shown(statement, monkeypatch):
    plain, made, shown = made_of((statement,), kept=GIVEN["kept"])
    assert len(shown.lines) == 1
    assert run(made, monkeypatch) == run(plain, monkeypatch)


def test_a_call_waits_and_text_is_made_of_what_was_there():
    """A held sink shows nothing, and what is evaluated keeps its order."""
    order = []
    _, made, _ = made_of(("print(f'{note(1)} {note(2):>3}', note(3))", "note(4)"), note=lambda n: order.append(n) or n)
    held = []
    with sinks_held(held):
        made(1, 1.0, "", 1, torch.tensor(1.0))
    assert order == [1, 2, 3, 4]
    assert [args for _, (args, _) in held] == [(1, 2, 3)]


@pytest.mark.parametrize(
    "statement",
    [
        "y = print(n)",
        "own(n)",
        "print(n) or own(n)",
        "x = [print(i) for i in (n,)]",
        "if own: own(n)",
        "word.join('ab')",
    ],
)
def test_calls_that_do_more_stay(statement):
    _, _, shown = made_of((statement,), own=[].append)
    assert not shown.lines


def test_a_logger_with_a_filter_of_the_user_s_stays():
    """The filter may look at what the step has done so far."""
    logger = logging.Logger("own")
    _, _, shown = made_of(("log.info('n %d', n)",), log=logger)
    assert len(shown.lines) == 1
    assert all(ask() for ask in shown.asks)
    logger.addFilter(type("Filter", (), {"filter": lambda self, record: True})())
    assert not all(ask() for ask in shown.asks)
    _, _, shown = made_of(("log.info('x %f', x)",), log=logger)
    assert not shown.lines


def test_helpers_are_exchanged_where_they_show_something():
    helpers = {}
    exec("def quiet(n):\n    return n\n", helpers)
    own, _, _ = made_of(("print(n)", "return n + 1"))
    _, made, shown = made_of(("return quiet(n) + loud(n, x, word, width, loss)",), quiet=helpers["quiet"], loud=own)
    assert len(shown.lines) == 1
    assert own.__code__ in shown.codes
    assert all(ask() for ask in shown.asks)
    held = []
    with sinks_held(held):
        assert made(3, 1.0, "", 1, torch.tensor(1.0)) == 7
    assert [args for _, (args, _) in held] == [(3,)]
    made.__globals__["loud"] = helpers["quiet"]
    assert not all(ask() for ask in shown.asks)
