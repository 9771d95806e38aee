"""A page on one search: what ran with what and when, how the values went, and which parameters did well."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.errors import MissingDependencyError
from hocket.search.search import Record

if TYPE_CHECKING:
    import optuna

__all__ = ["device_time_s", "load_plotly", "write_page"]

STATES = {"COMPLETE": "#2a7f62", "PRUNED": "#8a94a6", "FAIL": "#b3372f", "RUNNING": "#c08a1e"}


def load_plotly() -> Any:
    """The module of Plotly's figures, or a MissingDependencyError."""
    try:
        import plotly.graph_objects as figures
    except ImportError:
        raise MissingDependencyError("plotly", "tune", "the report of hocket.tune") from None
    return figures


def device_time_s(record: Record) -> tuple[float, float]:
    """Seconds that the device trained, and the seconds of all trials' epochs, as if each had it alone meanwhile.

    Example:
        >>> from hocket.search.search import Epoch
        >>> device_time_s(Record([Epoch(n, 0, "fused", n, 1, 0.0, 2.0, 0.5) for n in range(3)]))
        (2.0, 6.0)
    """
    passes = {(each.group, each.start_s, each.end_s) for each in record.epochs}
    return sum(end - start for _, start, end in passes), sum(each.end_s - each.start_s for each in record.epochs)


def write_page(study: optuna.Study, record: Record, folder: str | os.PathLike[str]) -> Path:
    """Write ``index.html`` into a folder, to be read without a network; gives its path."""
    figures = load_plotly()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    drawn = [_timeline(figures, study, record), _values(study), _parallel(study)]
    scripts = [True, False, False]  # plotly's own code stands in the page once
    parts = [figure.to_html(full_html=False, include_plotlyjs=own) for figure, own in zip(drawn, scripts, strict=True)]
    path = target / "index.html"
    part = path.with_name("index.html.part")
    part.write_text(
        "<!doctype html><html><head><meta charset='utf-8'><title>Hocket search</title></head>"
        "<body style='font-family: sans-serif; max-width: 70rem; margin: auto'>"
        f"<h1>{escape(study.study_name)}</h1>{_summary(study, record)}{''.join(parts)}</body></html>\n"
    )
    os.replace(part, path)
    return path


def _summary(study: Any, record: Record) -> str:
    took_s, apart_s = device_time_s(record)
    states = [trial.state.name for trial in study.trials]
    counts = ", ".join(f"{states.count(name)} {name.lower()}" for name in STATES if name in states)
    fusible, infusible = record.split
    lines = [
        f"{len(states)} trials: {counts}; {record.searches} fused models were made",
        f"{took_s:.1f} s of training; the trials' epochs add up to {apart_s:.1f} s, {apart_s / max(took_s, 1e-9):.1f} "
        "side by side on average",
        f"fusible: {', '.join(fusible) or 'none'}; infusible: {', '.join(infusible) or 'none'}",
        *(f"group {list(key)}: one at a time: {why}" for key, why in record.groups if why),
    ]
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _timeline(figures: Any, study: Any, record: Record) -> Any:
    """A bar for each trial's epochs in a slot, one row for each slot."""
    state = {trial.number: trial.state.name for trial in study.trials}
    figure = figures.Figure()
    for name, colour in STATES.items():
        own = [each for each in record.epochs if state.get(each.number) == name]
        if own:
            figure.add_bar(
                name=name.lower(),
                orientation="h",
                marker={"color": colour, "line": {"color": "white", "width": 0.5}},
                base=[each.start_s for each in own],
                x=[each.end_s - each.start_s for each in own],
                y=[f"group {each.group}, slot {each.slot}" for each in own],
                hovertext=[f"trial {each.number}, epoch {each.epoch}: {each.value} ({each.kind})" for each in own],
                hoverinfo="text",
            )
    figure.update_layout(title="What ran with what, and when", barmode="overlay", xaxis_title="seconds")
    return figure


def _values(study: Any) -> Any:
    from optuna.visualization import plot_intermediate_values

    return plot_intermediate_values(study).update_layout(title="Values", xaxis_title="epoch", yaxis_title="metric")


def _parallel(study: Any) -> Any:
    """Each trial that has a value as a line through the parameters that all of these have."""
    from optuna.search_space import intersection_search_space
    from optuna.visualization import plot_parallel_coordinate

    shared = list(intersection_search_space(study.get_trials(deepcopy=False)))
    return plot_parallel_coordinate(study, params=shared or None).update_layout(title="Parameters and values")
