"""Damaged files: bytes changed, cut, repeated or replaced, and JSON values replaced by awkward ones."""

import json
import random
from typing import Any

# Tokens that parsers stumble over: depth, digits, numbers that no float holds, halves of pairs, control characters.
TOKENS = (
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 401,
    b"9" * 5000,
    b"-" + b"9" * 500,
    b"1e999",
    b"1e308",
    b"-1",
    b"NaN",
    b"-Infinity",
    b"1000000000000",
    b"1000000000",
    b"1000000",
    b"0",
    b"0.5",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\\n\\u001b[31m"',
    b'"' + b"x" * 100_000 + b'"',
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b",",
    b'"',
    b"=",
    b"\n",
)
VALUES = (
    *(0, -1, 1, 2, 10**6, 10**9, 10**12, 10**30, 10**99, int("9" * 401), 0.5, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), True, None, "", "0", "-1", "a b", "\ud800", "\0", "x" * 100_000, "\n", "١", "²"),
    *("cpu0", "gpu0", "cpu0:1", "step", [], {}, [[]], [0] * 1000, ["a", "b"], {"a": {"1": 1.0}}),
)


def mutated(content: bytes, generator: random.Random) -> bytes:
    """Return `content` with one to four faults."""
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        if generator.random() < 0.5:
            content = _bytes_changed(content, generator)
            continue
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            content = _bytes_changed(content, generator)
        else:
            content = json.dumps(_value_changed(document, generator)).encode()
    return content


def _bytes_changed(content: bytes, generator: random.Random) -> bytes:
    begin = generator.randrange(len(content) + 1)
    end = min(len(content), begin + generator.choice((0, 1, 1, 8, 64, 512)))
    kind = generator.randrange(7)
    if kind == 0:
        return content[:begin]
    if kind == 1:
        return content[:begin] + content[end:]
    if kind == 2:
        return content[:end] + content[begin:]
    if kind == 3:
        return content[:begin] + bytes(end - begin) + content[end:]
    if kind == 4:
        return content[:begin] + generator.randbytes(end - begin) + content[end:]
    if kind == 5:  # a number becomes another one
        return content[:begin] + content[begin:].replace(b"1", generator.choice(TOKENS), 1)
    return content[:begin] + generator.choice(TOKENS) + content[generator.choice((begin, end)) :]


def _value_changed(document: Any, generator: random.Random) -> Any:
    """Replace, remove, repeat or exchange one value somewhere within."""
    places: list[tuple[Any, Any]] = []
    pending = [document]
    while pending:
        at = pending.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        for key in keys:
            places.append((at, key))
            pending.append(at[key])
    if not places:
        return generator.choice(VALUES)
    at, key = generator.choice(places)
    kind = generator.randrange(6)
    if kind == 0:
        del at[key]
    elif kind == 1 and isinstance(at, list):
        at.insert(generator.randrange(len(at) + 1), at[key])
    elif kind == 1:
        at[str(generator.choice(VALUES))] = at[key]
    elif kind == 2:
        other, place = generator.choice(places)
        at[key] = json.loads(json.dumps(other[place]))
    else:
        at[key] = generator.choice(VALUES)
    return document
