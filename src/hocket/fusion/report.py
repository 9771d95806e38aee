"""What fused and what did not, as text."""

from __future__ import annotations

from collections import Counter

from hocket.fusion.dispatcher import Dispatcher

__all__ = ["report"]


def report(array: Dispatcher) -> str:
    """One line in all, then one for each op of the last traced program, then the reasons of separate blocks."""
    programs = [program for program in array._programs.values() if program is not None]
    lines = []
    if not programs:
        how = "one by one" if array.backend == "loop" else "not traced yet"
        lines.append(f"{array.num_models} models, {how}")
    else:
        program = programs[-1]
        steps = [step for step in program.steps if step.used]
        counts = Counter(step.used for step in steps)
        by = ", ".join(f"{count} by {used}" for used, count in counts.most_common())
        lines.append(f"{array.num_models} models, {len(steps)} ops: {by}" if steps else f"{array.num_models} models")
        if array.choices:
            choice = array.choices[-1]
            times = ", ".join(f"{name} {us:,.0f} us" for name, us in sorted(choice.whole_us.items()))
            lines[0] += f"; chosen: {choice.winner} ({times})"
        layer_width = max((len(step.layer) for step in steps), default=0)
        op_width = max((len(step.op) for step in steps), default=0)
        lines += [f"{step.layer:{layer_width}}  {step.op:{op_width}}  {step.used}" for step in steps]
    lines += [f"separate: {name} ({reason})" for name, reason in array._blocks.separate.items()]
    return "\n".join(lines)
