"""Run the verbs on mutated files, and report everything but success or one clear line in time. Run in `tests`.

    python -m cli.mutated_files FOLDER NUMBER SEED

FOLDER has sound files, of which each is mutated NUMBER times. The faults found are one JSON list on stdout.
"""

import io
import json
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from hocket.cli import main
from support.mutations import mutated

MAX_CPU_S = 2.0
MAX_MEMORY_BYTES = 200 * 2**20

NAMES = {
    "graph": "graph.json",
    "costs": "costs.json",
    "machine": "machine.json",
    "plan": "plan.txt",
    "timeline": "timeline.json",
}
_PLAN = ("plan", "graph.json", "costs.json", "--machine", "machine.json")
_SIMULATE = ("simulate", "graph.json", "plan.txt", "costs.json", "--machine", "machine.json", "-o", "t.json")
_BOUNDS = ("bounds", "graph.json", "costs.json", "--machine", "machine.json")
_CHECK = ("check", "graph.json", "plan.txt", "--machine", "machine.json")
_REPORT = ("report", "graph.json", "plan.txt", "costs.json", "-o", "report", "--machine", "machine.json")
COMMANDS = {
    "graph": (_BOUNDS, _PLAN, _SIMULATE, _CHECK),
    "costs": (_BOUNDS, _PLAN, (*_PLAN, "--planner", "critical_path"), _SIMULATE),
    "machine": (_BOUNDS, _PLAN, _SIMULATE, _CHECK),
    "plan": (_CHECK, _SIMULATE),
    "timeline": ((*_REPORT, "timeline.json"),),
}


class _SlowError(BaseException):
    pass


def _too_slow(*_: Any) -> None:
    raise _SlowError


def outcome(words: tuple[str, ...]) -> str:
    """Run a command, and return what is wrong with how it ended, or nothing."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    before, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), out, err
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
    try:
        status = main(list(words))
    except _SlowError:
        return f"more than {MAX_CPU_S} s"
    except BaseException as error:  # noqa: BLE001
        return repr(error)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        sys.stdout, sys.stderr = before
    err.flush()
    lines = err.buffer.getvalue().decode().splitlines()
    if status not in (0, 1, 2):
        return f"status {status}"
    if status == 1 and (len(lines) != 1 or not lines[0].startswith("hocket: error: ")):
        return f"status 1 with {lines}"
    return ""


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def faults(folder: Path, kind: str, number: int, seed: int) -> list[str]:
    signal.signal(signal.SIGVTALRM, _too_slow)
    path = folder / NAMES[kind]
    sound = path.read_bytes()
    found = [f"sound: {words}: {wrong}" for words in COMMANDS[kind] if (wrong := outcome(words))]
    before = peak_bytes()
    for case in range(number):
        content = mutated(sound, random.Random(f"{seed}-{case}"))
        path.write_bytes(content)
        words = COMMANDS[kind][case % len(COMMANDS[kind])]
        wrong = outcome(words)
        if wrong:
            found.append(f"{kind} {seed}-{case}: {words[0]}: {wrong}: {content[:80]!r}")
        if peak_bytes() - before > MAX_MEMORY_BYTES:
            found.append(f"{kind} {seed}-{case}: {words[0]}: {peak_bytes() - before} bytes")
            before = peak_bytes()
    path.write_bytes(sound)
    return found


if __name__ == "__main__":
    home, count, start = sys.argv[1:]
    print(json.dumps([fault for kind in NAMES for fault in faults(Path(home), kind, int(count), int(start))]))
