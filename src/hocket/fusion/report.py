"""What fused and what did not, as text."""

from __future__ import annotations

from collections import Counter

from hocket.fusion.calls import Calls

__all__ = ["report"]


def report(calls: Calls) -> str:
    """One line in all, then one for each op of the last called program, then the reasons of separate blocks."""
    programs, num_models = calls.programs.made(), calls.store.num_models
    lines = []
    if not programs:
        how = "one by one" if calls.settings.backend == "loop" else "not recorded yet"
        lines.append(f"{num_models} models, {how}")
    else:
        program = programs[0]
        steps = [step for step in program.steps if step.used]
        counts = Counter(step.used for step in steps)
        by = ", ".join(f"{count} by {used}" for used, count in counts.most_common())
        lines.append(f"{num_models} models, {len(steps)} ops: {by}" if steps else f"{num_models} models")
        if calls.choices:
            choice = calls.choices[-1]
            times = ", ".join(f"{plan} {us:,.0f} us" for plan, us in choice.times_us.items())
            lines[0] += f"; chosen: {choice.winner} ({times})"
        layer_width = max((len(step.layer) for step in steps), default=0)
        op_width = max((len(step.op) for step in steps), default=0)
        lines += [f"{step.layer:{layer_width}}  {step.op:{op_width}}  {step.used}" for step in steps]
    lines += [f"separate: {name} ({reason})" for name, reason in calls.store.reasons.items()]
    return "\n".join(lines)
