"""The state of a fused optimizer by models: a plain state of each is put into its slot, and slots are taken out.

    plain 0:  exp_avg (n,)   step 7   lr 0.1          exp_avg (3, n)
    plain 1:  exp_avg (n,)   step 7   lr 0.2   <--->  step 7, or (3,) where the models' counts differ
    plain 2:  exp_avg (n,)   step 7   lr 0.3          lr (3,)

A plain state dict numbers its parameters as torch does: in the order of the groups, those of one model only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hocket.errors import InputError
from hocket.optim.counts import FLAGS, Counted, count_dtype
from hocket.optim.hyper import PerModel, as_tuple, by_model, from_models, is_row, of_model, plain
from hocket.optim.slots import Slots

Entries = dict[str, Any]


@dataclass(frozen=True)
class PlainState:
    """A slot's new state: for each group the entries of its parameters' plain states, and the plain options."""

    entries: Sequence[Sequence[Entries]]
    options: Sequence[Mapping[str, Any]]


class ModelStates(Counted):
    """The part of `hocket.optim.base.FusedOptimizer` that takes models' states out, and puts them in."""

    torch_class: ClassVar[type[torch.optim.Optimizer]]

    @abstractmethod
    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The tensors, besides a step count, that a parameter's state holds under these options."""

    def initial(self, key: str, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """An entry of a parameter's state, or of one model's part of it under plain options, before the first step."""
        return torch.zeros_like(p)

    def plain_state(self, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """The state of one model, under its own plain options, as `torch_class` would hold it."""
        return state

    def complete(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Make what a state lacks."""
        entries = self.entries(group)
        if entries and not state:
            state.update({key: self.first_count(key, p) for key in self.counters})
        for key in entries:
            if key not in state:
                state[key] = self.initial(key, p, group)

    def unfuse(self) -> list[dict[str, Any]]:
        """B plain state dicts, one for each model, that `torch_class` over that model's parameters loads.

        Example:
            >>> from hocket.optim import SGD
            >>> weights = torch.nn.Parameter(torch.zeros(2, 3)); weights.grad = torch.ones(2, 3)
            >>> optimizer = SGD([weights], lr=[0.1, 0.2], momentum=0.9, num_models=2)
            >>> optimizer.step()
            >>> second = optimizer.unfuse()[1]
            >>> second["param_groups"][0]["lr"], second["state"][0]["momentum_buffer"]
            (0.2, tensor([1., 1., 1.]))
            >>> torch.optim.SGD([weights[1].detach()], lr=1.0).load_state_dict(second)
        """
        return [self.model_state(model) for model in range(self.num_models)]

    def model_state(self, model: int) -> dict[str, Any]:
        """The plain state dict of one model. It shares no memory with the fused one."""
        template = self.torch_class([torch.zeros(1)], lr=1.0).param_groups[0]  # type: ignore[call-arg]
        state: dict[int, Any] = {}
        groups = []
        count = 0
        for group, params in zip(self.param_groups, self._params_of(model), strict=True):
            self.settle(group)
            own = {key: of_model(value, model) for key, value in group.items() if key not in ("params", "param_names")}
            numbers = list(range(count, count + len(params)))
            count += len(params)
            groups.append({**template, **own, "params": numbers, **_names_of(group, params)})
            for number, p in zip(numbers, params, strict=True):
                copies = {
                    key: row.to("cpu", count_dtype(), copy=True) if key == "step" else row.clone()
                    for key, row in self._rows_of(p, model).items()
                }
                if copies and (found := self.plain_state(copies, own)):
                    state[number] = found
        return {"state": state, "param_groups": groups}

    def load_unfused(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the states, and the options, of B plain optimizers of the class `torch_class`.

        Raises:
            InputError: not B of them, or they do not fit these parameters or each other.
        """
        if len(states) != self.num_models:
            raise InputError(f"states: expected {self.num_models}, one for each model, got {len(states)}")
        new = {model: self._checked(model, state, {}, f"state of model {model}") for model, state in enumerate(states)}
        self._merged(new)  # all of it fits, before the state is cleared
        steps_apart, self._per_model_steps = self._per_model_steps, True
        self.state.clear()
        self._put(new)
        self._per_model_steps = steps_apart
        for state in () if steps_apart else self.state.values():
            step = state.get("step")
            if step is not None and step.dim() and bool((step == step[0]).all()):
                state["step"] = torch.tensor(step[0].item(), dtype=count_dtype())
        self.share_all_counts()
        self._hocket_version += 1

    def select_models(self, models: Sequence[int], params: Iterable[torch.Tensor] | None = None) -> None:
        """Keep these models, in this order: it drops slots, or permutes them.

        Args:
            models: numbers of models as they are now, each at most once.
            params: the parameters of the remaining models, in the order in which the old ones stand in the groups. None
                where the parameters are the same objects, shrunk in place.

        Raises:
            InputError: no models, one twice, or parameters that do not fit.
        """
        chosen = [self.checked_model(model) for model in models]
        if not chosen:
            raise InputError("models: expected at least one model to keep, got none")
        if len(set(chosen)) < len(chosen):
            raise InputError(f"models: expected each model at most once, got {chosen}")
        slots = self._slots
        old = [[p for p in group["params"] if slots[p] in (None, *chosen)] for group in self.param_groups]
        flat = [p for group in old for p in group]
        new = flat if params is None else list(params)
        if len(new) != len(flat):
            raise InputError(f"params: expected {len(flat)} parameters for models {chosen}, got {len(new)}")
        now: dict[torch.Tensor, int | None] = {}
        state: dict[torch.Tensor, Entries] = {}
        for place, (was, p) in enumerate(zip(flat, new, strict=True)):
            slot = slots[was]
            shape = tuple(was.shape) if slot is not None else (len(chosen), *was.shape[1:])
            if tuple(p.shape) != shape:
                raise InputError(f"params: expected parameter {place} to have shape {shape}, got {tuple(p.shape)}")
            now[p] = None if slot is None else chosen.index(slot)
            if entries := self.state.get(was):
                state[p] = {
                    key: _selected(value, chosen) if slot is None or key in self.counters else value
                    for key, value in entries.items()
                }
        rest = iter(new)
        for group, kept in zip(self.param_groups, old, strict=True):
            group.update(_names_of(group, kept))
            for key in group.keys() - {"params", "param_names"}:
                parts = tuple(_selected(part, chosen) for part in as_tuple(group[key]))
                group[key] = parts if type(group[key]) is tuple else parts[0]
            group["params"] = [next(rest) for _ in kept]
        self._slots = Slots(len(chosen), now)
        self._frozen = [self._frozen[model] for model in chosen]
        self.state.clear()
        self.state.update(state)
        self.share_all_counts()
        self._hocket_version += 1

    def drop(self, model: int, params: Iterable[torch.Tensor] | None = None) -> None:
        """Drop the slot of a model. The models after it move up. `params` as in `select_models`."""
        slot = self.checked_model(model)
        self.select_models([other for other in range(self.num_models) if other != slot], params)

    def refill(self, model: int, state: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Begin anew in the slot of a model whose parameters are now another model's. The others go on undisturbed.

        Where models count their steps and have numbers of their own already, only values change, and a captured step
        stays as it is.

        Args:
            model: the slot.
            state: a plain state dict of `torch_class` to go on from, its options included. Without one the state is
                fresh.
            options: numbers of the new model (``lr=0.1``), for all groups. By default the slot's old ones.

        Raises:
            InputError: an unknown option or one out of bounds, or a state that does not fit.
        """
        slot = self.checked_model(model)
        self.put_model(slot, self.checked_refill(slot, state, options))

    def checked_refill(self, model: int, state: Mapping[str, Any] | None, options: Mapping[str, Any]) -> PlainState:
        """A slot's new state, from a plain state and options or afresh, checked."""
        for key, value in options.items():
            if key not in self.bounds:
                raise InputError(f"refill: expected options among {', '.join(self.bounds)}, got {key}={value!r}")
        new = self._checked(model, state, options, "state")
        for own in new.options:
            for key in own.keys() & self.bounds.keys():
                if any(map(is_row, as_tuple(own[key]))):
                    raise InputError(f"refill: {key}: expected the number of one model, got {own[key]!r}")
        self._merged({model: new})
        return new

    def put_model(self, model: int, new: PlainState) -> None:
        """Write what `checked_refill` gave into a slot. What the state does not have begins anew."""
        before = self._tensors()
        self.count_per_model()
        self._put({model: new})
        self.share_all_counts()
        if list(map(id, before)) != list(map(id, self._tensors())):
            self._hocket_version += 1
        if self.frozen[model]:
            self.unfreeze(model)

    def exchange(self, new: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Let other parameters take the places of some, each of the same model. Their states begin anew."""
        for group in self.param_groups:
            group["params"] = [new.get(p, p) for p in group["params"]]
        self._slots = Slots(self.num_models, {new.get(p, p): slot for p, slot in self._slots.items()})
        for p in new:
            self.state.pop(p, None)
        self._hocket_version += 1

    def check_fits(self, state_dict: Mapping[str, Any]) -> None:
        """Check a fused state dict that is to be loaded, before anything is changed."""
        total = self.num_models
        if not {"state", "param_groups"} <= state_dict.keys():
            got = ", ".join(state_dict) or "nothing"
            raise InputError(f"state_dict: expected 'state' and 'param_groups', got {got}")
        saved = state_dict.get("hocket", {}).get("num_models", total)
        if saved != total:
            raise InputError(f"state_dict: expected one of {total} models, got one of {saved}")
        self._check_state("state_dict", state_dict, [group["params"] for group in self.param_groups])
        for number, group in enumerate(state_dict["param_groups"]):
            for key in self.bounds:
                for part in as_tuple(group[key]):
                    if isinstance(part, torch.Tensor) and part.dim() == 1 and len(part) != total:
                        raise InputError(
                            f"state_dict: {key} of group {number}: expected {total} numbers, got {len(part)}"
                        )

    def _merged(self, new: Mapping[int, PlainState]) -> list[dict[str, list[Any]]]:
        """For each group the checked options by model, with these slots' values and schedulers' notes."""
        merged = []
        for number, group in enumerate(self.param_groups):
            self.settle(group)
            options = {model: each.options[number] for model, each in new.items()}
            values: dict[str, list[Any]] = {}
            for key in set.intersection(*(set(own) for own in options.values())):
                is_note = len(new) == self.num_models and all(isinstance(own[key], float) for own in options.values())
                if is_note or key in self.bounds or key in FLAGS:
                    row = by_model(group.get(key), self.num_models)
                    values[key] = [options[model][key] if model in options else was for model, was in enumerate(row)]
                if key in self.bounds:
                    self.settled(key, from_models(values[key]))
                elif key in FLAGS and any(value != values[key][0] for value in values[key]):
                    raise InputError(f"{key}: expected the same for all models of a group, got {values[key]!r}")
            merged.append(values)
        return merged

    def _checked(
        self, model: int, state: Mapping[str, Any] | None, options: Mapping[str, Any], what: str
    ) -> PlainState:
        """A plain state's entries, checked against the parameters' shapes, and its options, overridden by these."""
        params = self._params_of(model)
        if state is None:
            return PlainState([[{} for _ in own] for own in params], [options for _ in params])
        self._check_state(what, state, params, is_plain=True)
        groups = [{**group, **options} for group in state["param_groups"]]
        own = {
            index: {key: each for key, each in given.items() if each is not None}
            for index, given in state["state"].items()
        }
        entries = [[own.get(index, {}) for index in group["params"]] for group in groups]
        return PlainState(entries, [{key: _number_of(each) for key, each in group.items()} for group in groups])

    def _check_state(
        self, what: str, state: Mapping[str, Any], params: Sequence[Sequence[torch.Tensor]], is_plain: bool = False
    ) -> None:
        """Check groups, names of options, entries and their shapes of a state dict, of one model or of all."""
        kind, groups = type(self).__name__, state["param_groups"]
        found, expected = [len(group["params"]) for group in groups], list(map(len, params))
        if found != expected:
            raise InputError(f"{what}: expected groups of {expected} parameters, got groups of {found}")
        # The tensors that a parameter's state may hold, under any options.
        known = self.entries({**dict.fromkeys(self.bounds, 1.0), **dict.fromkeys(FLAGS, True)})
        for number, (group, own) in enumerate(zip(groups, params, strict=True)):
            if missing := [key for key in self.bounds if key not in group]:
                lacks = f"group {number} without {', '.join(missing)}"
                raise InputError(f"{what}: expected the options of {kind}, got {lacks}")
            for index, p in zip(group["params"], own, strict=True):
                shape = p.shape[1:] if is_plain and self._slots[p] is None else p.shape
                for key, value in state["state"].get(index, {}).items():
                    place = f"{what}: {key} of parameter {index}"
                    if key not in (*known, *self.counters):
                        raise InputError(f"{place}: expected the state of {kind}: {', '.join(known)}")
                    if key in known and isinstance(value, torch.Tensor) and value.shape != shape:
                        raise InputError(f"{place}: expected shape {tuple(shape)}, got {tuple(value.shape)}")

    def _put(self, new: Mapping[int, PlainState]) -> None:
        """Write into slots what they get."""
        for group, values in zip(self.param_groups, self._merged(new), strict=True):
            for key, row in values.items():
                if row != by_model(group.get(key), self.num_models):
                    self.set_by_model(group, key, row)
        for model, each in new.items():
            self._put_entries(model, each.entries)

    def _put_entries(self, model: int, entries: Sequence[Sequence[Entries]]) -> None:
        """Write one model's plain entries into its rows. Counters stay shared where its parameters are in step."""
        flat = [own for group in entries for own in group]
        in_step = len({tuple(_number_of(own.get(key)) for key in self.counters) for own in flat}) < 2
        rows: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for group, params, given in zip(self.param_groups, self._params_of(model), entries, strict=True):
            options = {key: of_model(group[key], model) for key in self.bounds}
            for p, own in zip(params, given, strict=True):
                if self._slots[p] is not None:
                    self.state.pop(p, None)
                if not own and p not in self.state:
                    continue
                state = self.state[p]
                self.complete(p, group, state)
                for key in () if in_step else self.counters:
                    if key in state:
                        state[key] = state[key].clone()  # until they are joined again
                for key, row in self._rows_of(p, model).items():
                    if key in self.counters:
                        # torch's SGD has a state without a count.
                        row.fill_(_number_of(own.get(key, 1.0 if key == "step" and own else self.counters[key])))
                    else:
                        rows.append(row)
                        values.append(torch.as_tensor(own[key]) if key in own else self.initial(key, row, options))
        if rows:
            torch._foreach_copy_(rows, values)

    def _tensors(self) -> list[torch.Tensor]:
        """The tensors of the groups and of the state: where they are the same ones, only values have changed."""
        parts = [part for group in self.param_groups for key in self.bounds for part in as_tuple(group[key])]
        entries = [value for state in self.state.values() for value in state.values()]
        return [each for each in (*parts, *entries) if isinstance(each, torch.Tensor)]

    def _params_of(self, model: int) -> list[list[torch.Tensor]]:
        """For each group the parameters that model has a part in."""
        return [[p for p in group["params"] if self._slots[p] in (None, model)] for group in self.param_groups]

    def _rows_of(self, p: torch.Tensor, model: int) -> Entries:
        """One model's part of a parameter's state."""
        is_fused = self._slots[p] is None
        return {
            key: value[model] if value.dim() and (is_fused or key in self.counters) else value
            for key, value in self.state.get(p, {}).items()
        }


def _names_of(group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> dict[str, list[str]]:
    """The names of some of a group's parameters, where they have names."""
    mine, names = set(params), group.get("param_names")
    if names is None:
        return {}
    return {"param_names": [name for p, name in zip(group["params"], names, strict=True) if p in mine]}


def _selected(value: Any, models: Sequence[int]) -> Any:
    """The rows of these models, of what has any."""
    if not (isinstance(value, torch.Tensor) and value.dim()):
        return value
    found = plain(value).index_select(0, torch.tensor(models, device=value.device))
    return found.as_subclass(PerModel) if isinstance(value, PerModel) else found


def _number_of(value: Any) -> Any:
    """A tensor of one element as a Python number, or anything else as it stands."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
