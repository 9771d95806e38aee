"""Progress of a search: a table on a terminal, lines elsewhere, and a page.

The page begins with the best parameters. Below are slots over time, and Optuna's own pictures: history, importances,
values over epochs, and parallel coordinates.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from hocket.errors import MissingDependencyError
from hocket.search.run import Status
from hocket.search.search import Record, Search

if TYPE_CHECKING:
    import optuna

__all__ = ["LiveTable", "device_time_s", "lines", "load_plotly", "write_page"]

BETWEEN_RUNGS_S = 1.0  # at least, from one line to the next
BETWEEN_LINES_S = 60.0  # at most: where a rung takes longer, a line says that the search goes on
STATES = {"COMPLETE": "#2a7f62", "PRUNED": "#8a94a6", "FAIL": "#b3372f", "RUNNING": "#c08a1e"}


STYLE = (
    "body{margin:0;background:#f7f6f2;color:#1f2630;font:15px/1.55 ui-sans-serif,system-ui,sans-serif}"
    "main{max-width:1180px;margin:0 auto;padding:44px 28px 72px}h1{font-size:34px;overflow-wrap:anywhere}"
    ".scroll{overflow:auto;background:#fff;border:1px solid #d9d6ce;border-radius:10px}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:7px 14px}p{color:#5b6470}"
    ".plotly-graph-div{margin-top:16px}@media(max-width:640px){main{padding:28px 16px}h1{font-size:26px}}"
)
BEST_TRIALS = 5


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
    """Write ``index.html`` into a folder, to be read without a network, and return its path."""
    figures = load_plotly()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    drawn = [_timeline(figures, study, record), *_histories(study), _values(study), _parallel(study)]
    scripts = [True] + [False] * len(drawn)  # plotly's own code stands in the page once
    parts = [
        figure.update_layout(template="plotly_white").to_html(full_html=False, include_plotlyjs=own)
        for figure, own in zip(drawn, scripts, strict=False)
    ]
    path = target / "index.html"
    part = path.with_name("index.html.part")
    part.write_text(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><title>Hocket search</title>"
        f"<style>{STYLE}</style></head><body><main><h1>{escape(study.study_name)}</h1>"
        f"{_best(study)}{_summary(study, record)}{''.join(parts)}</main></body></html>\n"
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


def _best(study: Any) -> str:
    """The parameters of the best trials, as a table, if any is complete."""
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    maximize = study.direction.name == "MAXIMIZE"
    best = sorted(complete, key=lambda trial: (-trial.value if maximize else trial.value, trial.number))[:BEST_TRIALS]
    if not best:
        return ""
    names = list(dict.fromkeys(name for trial in best for name in trial.params))
    head = "".join(f"<th scope='col'>{escape(word)}</th>" for word in ("trial", "value", *names))
    rows = "".join(
        f"<tr><th scope='row'>{trial.number}</th><td>{trial.value:.6g}</td>"
        + "".join(f"<td>{escape(_shown(trial.params.get(name, '')))}</td>" for name in names)
        for trial in best
    )
    return f"<h2>Best parameters</h2><div class='scroll' tabindex='0'><table><tr>{head}</tr>{rows}</table></div>"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _histories(study: Any) -> list[Any]:
    """The best value so far, and how much each parameter matters where enough trials tell."""
    from optuna.visualization import plot_optimization_history, plot_param_importances

    found = [_log_where_positive(plot_optimization_history(study).update_layout(title="Best value so far"))]
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    if len({trial.value for trial in complete}) > 1:
        found.append(plot_param_importances(study).update_layout(title="How much each parameter matters"))
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
    figure.update_layout(title="What ran with what, and when", barmode="overlay", xaxis_title="seconds")
    return figure


def _values(study: Any) -> Any:
    from optuna.visualization import plot_intermediate_values

    figure = plot_intermediate_values(study).update_layout(title="Values", xaxis_title="epoch", yaxis_title="metric")
    return _log_where_positive(figure)


def _parallel(study: Any) -> Any:
    """Each trial that has a value as a line through the parameters that all of these have."""
    from optuna.search_space import intersection_search_space
    from optuna.visualization import plot_parallel_coordinate

    shared = list(intersection_search_space(study.get_trials(deepcopy=False)))
    return plot_parallel_coordinate(study, params=shared or None).update_layout(title="Parameters and values")


class LiveTable:
    """Table that is redrawn after each epoch. Without a terminal, one line is written for each rung."""

    def __init__(self, file: TextIO, clock: Callable[[], float] = monotonic) -> None:
        self._file = file
        self._clock = clock
        self._live: Any = None
        self._line = ""  # the last one that is not written yet
        self._shown: tuple[int, int] | None = None
        self._shown_s = clock()

    def __enter__(self) -> LiveTable:
        if self._file.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._file), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._write()

    def update(self, search: Search) -> None:
        """Paint what a search is doing."""
        if self._live is not None:
            self._live.update("\n".join(lines(search)), refresh=True)
            return
        runs = search.runs.values()
        decided = sum(run.status.is_over for run in runs), sum(run.until for run in runs)
        waited_s = self._clock() - self._shown_s
        is_rung = decided != self._shown and (decided[0] > 0 or self._shown is not None)
        if is_rung or waited_s >= BETWEEN_LINES_S:
            self._line = lines(search)[0]
        self._shown = decided
        if waited_s >= BETWEEN_RUNGS_S:
            self._write()

    def _write(self) -> None:
        if self._line:
            self._file.write(f"{self._line}\n")
            self._file.flush()
            self._line, self._shown_s = "", self._clock()


def lines(search: Search) -> list[str]:
    """A line on all trials, and one for each group."""
    runs = list(search.runs.values())
    over = [run for run in runs if run.status.is_over]
    values = [run.values[-1] for run in runs if run.values and run.status is not Status.FAILED]
    best = (max if search.policy.maximize else min)(values, default=None)
    shown = "none yet" if best is None else f"{best:.6g}"
    epochs_done = sum(run.epochs for run in runs)
    found = [f"tune: {len(over)} of {search.trials} trials over, {epochs_done} epochs, best value {shown}"]
    for group in search.groups:
        trainer = group.trainer
        if trainer is not None:
            agreed = ", ".join(map(str, group.key)) or "all trials"
            epochs = sorted(run.epochs for _, run in trainer.active)
            where = f"epoch {epochs[0]} to {epochs[-1]}" if epochs else "done"
            found.append(
                f"  {agreed}: {len(epochs)} of {len(trainer.slots)} slots ({trainer.kind}), {where}, "
                f"{len(group.waiting)} waiting"
            )
    return found
