"""The argument of the user's function: a dict of hyper-parameters with the `suggest_*` of Optuna's trial.

    params["lr"]                                   a space of distributions was given
    params.suggest_float("lr", 1e-4, 1e-1)         the function itself says what there is to propose

A trial is built again and again: to see what changes shapes, in a slot, in a process, after a kill. Only the first call
proposes. Later the dict answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

PLAIN = (type(None), bool, int, float, str)


def first_value(name: str, distribution: Any) -> Any:
    """The first choice, or the lowest number."""
    choices = getattr(distribution, "choices", None)
    return distribution.low if choices is None else choices[0]


class Hyperparameters(dict[str, Any]):
    """Hyper-parameters by name.

    Args:
        params: those that are known.
        suggest: proposes the value of a name and a distribution that is not known.

    Example:
        >>> params = Hyperparameters({"lr": 0.1})
        >>> params["lr"], params.suggest_float("lr", 0.01, 1.0), params.suggest_categorical("size", [(8,), (8, 4)])
        (0.1, 0.1, (8,))
        >>> sorted(params)
        ['lr', 'size']
    """

    def __init__(self, params: Mapping[str, Any], suggest: Callable[[str, Any], Any] = first_value) -> None:
        super().__init__(params)
        self._suggest = suggest

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number from an interval, as `optuna.Trial.suggest_float`."""
        from optuna.distributions import FloatDistribution

        return float(self._value(name, FloatDistribution(low, high, log=log, step=step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number from an interval, as `optuna.Trial.suggest_int`."""
        from optuna.distributions import IntDistribution

        return int(self._value(name, IntDistribution(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of several values, as `optuna.Trial.suggest_categorical`. They may be tuples and lists."""
        return self._value(name, categories(choices))

    def _value(self, name: str, distribution: Any) -> Any:
        if name not in self:
            self[name] = self._suggest(name, distribution)
        return self[name]


def categories(choices: Sequence[Any]) -> Any:
    """Optuna's distribution of these, without its warning of what storages cannot keep, since here they can."""
    import warnings

    from optuna.distributions import CategoricalDistribution

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Choices for a categorical distribution")
        return CategoricalDistribution(choices)


def stored_form(distribution: Any) -> tuple[Any, dict[Any, Any]]:
    """A distribution as files and databases keep it, and what its values there stand for.

    They keep numbers and text only. A tuple comes back as a list, which is another category for Optuna.

    Example:
        >>> kept, meaning = stored_form(categories([(8,), (8, 4), "none"]))
        >>> kept.choices, meaning["(8, 4)"]
        (('(8,)', '(8, 4)', 'none'), (8, 4))
    """
    choices = getattr(distribution, "choices", ())
    if all(isinstance(choice, PLAIN) for choice in choices):
        return distribution, {}
    named = [choice if isinstance(choice, PLAIN) else repr(choice) for choice in choices]
    meaning = {name: choice for name, choice in zip(named, choices, strict=True) if not isinstance(choice, PLAIN)}
    return categories(named), meaning
