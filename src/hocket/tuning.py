"""`hocket.tune`: the one place that joins a search with what schedules its fused steps.

The page on a search shows the best parameters first, then slots over time and Optuna's own pictures. It has the frame
of the report on a step. Plotly's figures take its colours, so that they suit both backgrounds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.errors import MissingDependencyError
from hocket.ir._fields import write_text
from hocket.reporting.markup import Cell, framed, header, number, section, table, text
from hocket.reporting.words import value_text
from hocket.search.fused import Runner
from hocket.search.policy import Schedules
from hocket.search.search import LiveTable, Record, device_time_s
from hocket.search.split import Train
from hocket.search.tune import SearchConfig, search

if TYPE_CHECKING:
    import optuna


def tune(
    train: Train,
    space: Mapping[str, Any] | None = None,
    trials: int | None = None,
    epochs: int = 10,
    *,
    halving: Schedules | None = None,
    study: optuna.Study | None = None,
    direction: str = "minimize",
    storage: Any = None,
    name: str | None = None,
    executor: str = "auto",
    slots: int | None = None,
    memory_bytes: int | None = None,
    fusible: Sequence[str] | None = None,
    seed: int = 0,
    timeout: float | None = None,
    patience: int | None = None,
    value: str = "last",
    checkpoints: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callable[[Any, Any], object]] = (),
    processes: int | None = None,
    cache: bool | str | os.PathLike[str] = True,
    report: str | os.PathLike[str] | None = None,
) -> optuna.Study:
    """Search for hyper-parameters. Trials that agree on all shapes train as one fused model.

    Every trial has the values that it would have alone: its weights and random numbers follow from its parameters and
    `seed`, and the order of its data from `seed` and the epoch.

    Args:
        train: the user's own ``train(params) -> hocket.Training``, a function of one trial.
        space: Optuna's distributions by name. Without it, `train` itself defines the space:
            ``params.suggest_float("lr", 1e-4, 1e-1, log=True)``, as Optuna's trials do.
        trials: how many trials (60). `Hyperband` determines the number itself.
        epochs: how many epochs a trial trains at most.
        halving: `hocket.Halving`, `hocket.Hyperband` or `hocket.Asha`, which end the worse trials early, or
            `hocket.Population`, by which they continue from the better ones. If None, all trials train all epochs. The
            study's pruner is not used: pruners decide one trial at a time, while all trials of a rung report at once.
        study: an Optuna study of one direction, with its sampler, storage and enqueued trials.
        direction: without a study, ``"minimize"`` or ``"maximize"``. Such a study proposes by TPE.
        storage: without a study, where its trials are kept: a value for `optuna.create_study`. In memory if None.
        name: without a study, its name. If the storage has a study of this name, it is continued.
        executor: ``"fused"``, ``"scheduled"`` (fused, and the fused step planned by `hocket.schedule`), ``"serial"``
            (one trial after another), ``"processes"`` (several processes with one trial each), or ``"auto"``, the same
            as ``"fused"``: an array of models measures itself whether it computes them one by one. Trials that cannot
            be fused train one at a time, and a warning gives the reason.
        slots: how many trials are fused at most (64).
        memory_bytes: limit for the models of one group, with their optimizers and the memory of their backward.
        fusible: names of the parameters that change no shapes. Found by trying if None.
        seed: of weights, random numbers, the order of data, and proposals.
        timeout: seconds after which the search ends, at the next epoch. Unfinished trials are pruned. With
            `checkpoints` they stay, and the same call continues them.
        patience: a trial is complete after this many epochs without a better value. None for no limit.
        value: ``"last"`` or ``"best"``: which of its epochs' values counts for a trial, in the study and at rungs.
        checkpoints: a folder for the states of unfinished trials, and of the best one (``best.pt``). A search that was
            killed continues when it is called again with the same study and folder.
        callbacks: called with the study and each finished trial, as by ``study.optimize``. They may call
            ``study.stop()``.
        processes: how many, for ``executor="processes"``. Half the processors if None, at least two.
        cache: of `hocket.schedule`, for ``executor="scheduled"``.
        report: a folder for a page that shows which trials ran together and when, and their values. Needs plotly.

    Returns:
        The study, whose trials have a value for each epoch.

    Raises:
        InputError: an invalid argument, batch or metric.
        ExecutionError: the storage failed, or all trials did. Otherwise a trial that raises or whose loss is not finite
            fails alone.
        MissingDependencyError: Optuna is not installed (or plotly, for a report).

    Example:
        >>> import hocket, torch
        >>> from optuna.distributions import FloatDistribution
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(1)
        >>> loss = torch.nn.functional.mse_loss
        >>> def train(params):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
        ...     return hocket.Training(model, optimizer, loss, [(x, 2 * x)], metric=loss)
        >>> study = hocket.tune(train, {"lr": FloatDistribution(0.01, 1, log=True)}, trials=8, epochs=3)
        >>> len(study.trials), len(study.best_trial.intermediate_values)
        (8, 3)
    """
    given = locals()
    settings = {each.name: given[each.name] for each in fields(SearchConfig) if each.name in given}
    if report is not None:
        load_plotly()
        Path(report).mkdir(parents=True, exist_ok=True)
    runner: Runner | None = None
    if executor == "scheduled":
        from hocket.session import schedule

        def runner(step: Any, array: Any, optimizer: Any) -> Any:
            return schedule(step, array, optimizer, cache=cache, numerics="rounding")

    with LiveTable(sys.stderr) as live:
        config = SearchConfig(**settings, runner=runner, on_progress=live.update)
        found, record = search(train, space, config)
    if report is not None:
        write_page(found, record, report)
    return found


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
        parts.append(section(f"figure-{place}", title, f'<div class="figure">{html}</div>'))
        plotly_code = False
    path = target / "index.html"
    write_text(path, framed(study.study_name, "\n".join(parts), css=CSS))
    return path


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
        + [Cell(text(value_text(trial.params.get(name, "")))) for name in names]
        for trial in best
    ]
    head = [Cell("trial"), Cell("value", "n"), *(Cell(text(name)) for name in names)]
    return section("best", "Best parameters", table(head, rows, caption="Parameters of the best trials"))


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
