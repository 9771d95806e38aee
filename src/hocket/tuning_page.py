"""The page on a search: the best parameters first, then slots over time and Optuna's own pictures.

It has the frame of the report on a step. Plotly's figures take its colours, so that they suit both backgrounds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.errors import MissingDependencyError
from hocket.ir._fields import write_text
from hocket.reporting.markup import Cell, framed, header, number, table, text
from hocket.search.progress import device_time_s
from hocket.search.search import Record

if TYPE_CHECKING:
    import optuna

STATES = {"COMPLETE": "#2a7f62", "PRUNED": "#8a94a6", "FAIL": "#b3372f", "RUNNING": "#c08a1e"}
BEST_TRIALS = 5
CLEAR = "rgba(0,0,0,0)"
LAYOUT = {
    "template": "plotly_white",
    "paper_bgcolor": CLEAR,
    "plot_bgcolor": CLEAR,
    "margin": {"t": 36, "b": 48},
    "legend": {"orientation": "h", "y": 1.1},
}
CONFIG = {"responsive": True, "displayModeBar": False}
# Plotly writes its colours into each element, where only an important rule is stronger.
CSS = """
.figure { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.figure .main-svg { background: transparent !important; }
.figure text { fill: var(--ink) !important; }
.figure :is(.xgrid, .ygrid, .zerolinelayer path) { stroke: var(--line) !important; }
.figure .bg { fill: transparent !important; }
"""


def load_plotly() -> Any:
    """The module of Plotly's figures, or a MissingDependencyError."""
    try:
        import plotly.graph_objects as figures
    except ImportError:
        raise MissingDependencyError("plotly", "tune", "the report of hocket.tune") from None
    return figures


def write_page(study: optuna.Study, record: Record, folder: str | os.PathLike[str]) -> Path:
    """Write ``index.html`` into a folder, to be read without a network, and return its path."""
    figures = load_plotly()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    drawn = {
        "What ran with what, and when": _timeline(figures, study, record),
        **_histories(study),
        "Values": _values(study),
        "Parameters and values": _parallel(study),
    }
    plotly_code = True  # stands in the page once
    parts = [_top(study, record), _best(study)]
    for place, (title, figure) in enumerate(drawn.items()):
        figure.update_layout(title=None, **LAYOUT)
        html = figure.to_html(full_html=False, include_plotlyjs=plotly_code, config=CONFIG)
        parts.append(_section(f"figure-{place}", title, f'<div class="figure">{html}</div>'))
        plotly_code = False
    path = target / "index.html"
    write_text(path, framed(study.study_name, "\n".join(parts), css=CSS))
    return path


def _section(identity: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{identity}"><h2 id="{identity}">{text(title)}</h2>{body}</section>'


def _top(study: Any, record: Record) -> str:
    took_s, apart_s = device_time_s(record)
    states = [trial.state.name for trial in study.trials]
    counts = ", ".join(f"{states.count(name)} {name.lower()}" for name in STATES if name in states)
    fusible, infusible = record.split
    complete = _complete(study)
    tiles = [
        ("Trials", str(len(states)), counts),
        ("Training", f"{took_s:.1f} s", f"the trials' epochs add up to {apart_s:.1f} s"),
        ("Side by side", f"{apart_s / max(took_s, 1e-9):.1f}", f"trials on average, {record.searches} fused models"),
        ("Fusible", str(len(fusible)), ", ".join(fusible) or "none"),
        ("Infusible", str(len(infusible)), ", ".join(infusible) or "none"),
    ]
    best = complete[0] if complete else None
    found = "No value yet" if best is None else f"Best value {best.value:.6g}, of trial {best.number}"
    why = " ".join(f"Group {list(key)}: one at a time: {why}." for key, why in record.groups if why)
    return header(study.study_name, found, why, tiles)


def _complete(study: Any) -> list[Any]:
    """The trials with a value, the best first."""
    sign = -1 if study.direction.name == "MAXIMIZE" else 1
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    return sorted(complete, key=lambda trial: (sign * trial.value, trial.number))


def _best(study: Any) -> str:
    """The parameters of the best trials, as a table, if any is complete."""
    best = _complete(study)[:BEST_TRIALS]
    if not best:
        return ""
    names = list(dict.fromkeys(name for trial in best for name in trial.params))
    rows = [
        [Cell(str(trial.number)), number(trial.value, f"{trial.value:.6g}")]
        + [Cell(text(_shown(trial.params.get(name, "")))) for name in names]
        for trial in best
    ]
    head = [Cell("trial"), Cell("value", "n"), *(Cell(text(name)) for name in names)]
    return _section("best", "Best parameters", table(head, rows, caption="Parameters of the best trials"))


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _histories(study: Any) -> dict[str, Any]:
    """The best value so far, and how much each parameter matters where enough trials tell."""
    from optuna.visualization import plot_optimization_history, plot_param_importances

    found = {"Best value so far": _log_where_positive(plot_optimization_history(study))}
    if len({trial.value for trial in _complete(study)}) > 1:
        found["How much each parameter matters"] = plot_param_importances(study)
    return found


def _log_where_positive(figure: Any) -> Any:
    """Give the values a logarithmic axis if all are positive and the largest is ten times the smallest."""
    values = [value for trace in figure.data for value in (trace.y if trace.y is not None else ())]
    known = [value for value in values if isinstance(value, (int, float))]
    return figure.update_yaxes(type="log") if known and 0 < 10 * min(known) <= max(known) else figure


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
    return figure.update_layout(barmode="overlay", xaxis_title="seconds")


def _values(study: Any) -> Any:
    from optuna.visualization import plot_intermediate_values

    return _log_where_positive(plot_intermediate_values(study)).update_layout(xaxis_title="epoch", yaxis_title="metric")


def _parallel(study: Any) -> Any:
    """Each trial that has a value as a line through the parameters that all of these have."""
    from optuna.search_space import intersection_search_space
    from optuna.visualization import plot_parallel_coordinate

    shared = list(intersection_search_space(study.get_trials(deepcopy=False)))
    return plot_parallel_coordinate(study, params=shared or None)
