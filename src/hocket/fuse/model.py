r"""The fused module: B models as one, their parameters stacked, their ops fused where a rule, ``vmap`` or a loop can.

    models --compare--> blocks --trace--> graph --rules--> program --choose--> what runs
       \--tensors, stacked--> parameters (B, *shape)
        \--without tensors--> shells, from which `unfuse` makes plain modules again

Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, section 3.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fuse import fallback, trace
from hocket.fuse.choose import Choice, choose, is_watched, put_back
from hocket.fuse.compare import Blocks, compare
from hocket.fuse.inputs import is_per_model
from hocket.fuse.loss import per_model_loss
from hocket.fuse.program import Program, Step, make_program
from hocket.fuse.shares import GradientMemory
from hocket.fuse.stacked import Stacked, lead

__all__ = ["Array"]

BACKENDS = ("auto", "rule", "vmap", "loop")
MAX_PROGRAMS = 32


class _Store(nn.Module):
    """Holds stacked tensors under the names they have in the models; its state is the array's to save."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        return


class Array(nn.Module):
    """B models fused; see `hocket.fuse.fuse`.

    Attributes:
        num_models: B.
        backend: "auto", "rule", "vmap" or "loop".
        choices: what was timed and chosen, one for each kind of call so far (``backend="auto"``).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        backend: str = "auto",
        strict: bool = False,
        separate: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        shared: bool | None = None,
    ) -> None:
        super().__init__()
        if backend not in BACKENDS:
            raise InputError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
        blocks = compare(models, separate)
        models = list(models)
        if strict and blocks.separate:
            named = "; ".join(f"{name}: {reason}" for name, reason in blocks.separate.items())
            raise InputError(f"blocks that cannot fuse (strict=True): {named}")
        if seeds is not None and len(seeds) != len(models):
            raise InputError(f"seeds: expected {len(models)}, one for each model, got {len(seeds)}")
        self.num_models = len(models)
        self.backend = backend
        self.strict = strict
        self.shared = shared
        self.training = models[0].training
        self.choices: list[Choice] = []
        self.told: set[tuple[str, str]] = set()
        self.gradient_memory = GradientMemory()
        self._blocks: Blocks = blocks
        self._seeds = None if seeds is None else [int(seed) for seed in seeds]
        self._generators: dict[torch.device, tuple[torch.Generator, ...]] = {}
        self._programs: dict[Any, Program | None] = {}
        self._chosen: dict[Any, Callable[[list[Any]], Any]] = {}
        self._ready: dict[Any, tuple[tuple[bool, ...], Callable[[list[Any]], Any]]] = {}
        self._goes_one_by_one = False  # nothing can trace or batch the model
        self._per_model: dict[Any, tuple[bool, ...]] = {}
        self._version = 0
        self._hocket_version = 0  # whoever captured a step sees by it that another one is needed
        self._fill(models)
        self._check_doubts()

    # ------------------------------------------------------------------------------------- making

    def _fill(self, models: list[nn.Module]) -> None:
        """Stack the tensors; keep the models without theirs."""
        self._shells = [_shell(model, index) for index, model in enumerate(models)]
        self.fused = _Store()
        self.separate = nn.ModuleList()
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._separate_index: dict[str, int] = {}
        first_name: dict[int, str] = {}
        columns = [
            dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
            for model in models
        ]
        for name, tensor in columns[0].items():
            if any(name.startswith(block + ".") for block in self._blocks.separate):
                continue
            if id(tensor) in first_name:  # tied: one tensor under several names
                self._places[name] = self._places[first_name[id(tensor)]]
                continue
            first_name[id(tensor)] = name
            stacked = torch.stack([column[name].detach() for column in columns]).contiguous()
            store, leaf = self._store(name)
            if isinstance(tensor, nn.Parameter):
                param = nn.Parameter(stacked, requires_grad=tensor.requires_grad)
                param._hocket_models = len(models)  # type: ignore[attr-defined]
                store.register_parameter(leaf, param)
            else:
                store.register_buffer(leaf, stacked)
            self._places[name] = (store, leaf)
        for name in self._blocks.separate:
            if any(name.startswith(other + ".") for other in self._blocks.separate):
                continue
            self._separate_index[name] = len(self.separate)
            own = [copy.deepcopy(model.get_submodule(name)) for model in models]
            _mark(own)
            self.separate.append(nn.ModuleList(own))

    def _store(self, name: str) -> tuple[nn.Module, str]:
        """The container for a dotted name, and the last part of the name."""
        *path, leaf = name.split(".")
        store: nn.Module = self.fused
        for each in path:
            if each not in store._modules:
                store.add_module(each, _Store())
            store = store._modules[each]  # type: ignore[assignment]
        return store, leaf

    def _check_doubts(self) -> None:
        """Layers of the user's whose attributes differ: harmless if all models trace to the same graph."""
        if not self._blocks.doubts:
            return
        path, reason = next(iter(self._blocks.doubts.items()))
        where = f"layer {path}" if path else "the model itself"
        graphs: list[Any] = []
        for index in range(self.num_models):
            try:
                sample = _required_arguments(self._shells[index])
                traced = trace.symbolic(self._shells[index], sample, {}, frozenset(self._separate_index))
            except (torch.fx.proxy.TraceError, *trace.FAILURES) as error:
                raise InputError(f"models differ: {where}: {reason}; and whether it matters cannot be seen") from error
            described = [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in traced.graph.nodes]
            if graphs and described != graphs[0]:
                raise InputError(f"models differ: {where}: {reason}")
            graphs.append(described)

    # ----------------------------------------------------------------------------- what programs ask for

    def tensor(self, name: str) -> Stacked:
        """The stacked parameter or buffer of this name."""
        store, leaf = self._places[name]
        found: Tensor | None = store._parameters.get(leaf)
        if found is None:
            found = store._buffers[leaf]
        assert found is not None
        return Stacked(found)

    def layers(self, name: str) -> tuple[nn.Module, ...]:
        """The layer of each model, without its tensors."""
        return tuple(shell.get_submodule(name) for shell in self._shells)

    def names_in(self, layer: str) -> list[str]:
        """The names of a layer's stacked tensors, from the layer on."""
        prefix = f"{layer}." if layer else ""
        return [name.removeprefix(prefix) for name in self._places if name.startswith(prefix)]

    def separate_block(self, name: str) -> list[nn.Module] | None:
        """The models' own modules of a block that stays separate, or None."""
        index = self._separate_index.get(name)
        return None if index is None else self._group(index)

    def _group(self, place: int) -> list[nn.Module]:
        """The models' own modules of the separate block at this place."""
        return list(self.separate[place].children())

    def generators_on(self, device: torch.device) -> tuple[torch.Generator, ...]:
        """One generator for each model on a device, or none where no seeds were given."""
        if self._seeds is None:
            return ()
        if device not in self._generators:
            made = tuple(torch.Generator(device=device).manual_seed(seed) for seed in self._seeds)
            self._generators[device] = made
        return self._generators[device]

    @property
    def is_seeded(self) -> bool:
        """Whether every model draws random numbers from its own generator."""
        return self._seeds is not None

    def all_parameters(self) -> list[Tensor]:
        """Every parameter, stacked and separate."""
        return list(self.parameters())

    def all_tensors(self) -> dict[str, Tensor]:
        """Every stacked parameter and buffer, by each of its names."""
        found: dict[str, Any] = {}
        for name, (store, leaf) in self._places.items():
            own: Any = store._parameters.get(leaf)
            found[name] = store._buffers[leaf] if own is None else own
        return found

    # ------------------------------------------------------------------------------------------ running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of all models, the models first.

        Args:
            args: what one model takes; tensors ``(B, N, ...)``, or ``(N, ...)`` for all models.
            kwargs: the same.

        Raises:
            InputError: an op fails, or the input fits no model; names the layer.
        """
        known = self._known(args) if not kwargs else None
        if known in self._ready:
            own, run = self._ready[known]
            return self._out(run([Stacked(arg) if each else arg for arg, each in zip(args, own, strict=True)]))
        call, leaves = trace.Call.of(args, kwargs)
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
        own = self._own_leaves(call, leaves, shapes)
        values = [Stacked(leaf) if each else leaf for leaf, each in zip(leaves, own, strict=True)]
        if self.backend == "loop":
            return self._out(self._one_by_one(values, call.spec))
        program = self._program(call, values, shapes, own)
        if program is None:
            return self._out(self._whole(values, call.spec))
        if self.backend == "auto" and not is_watched():
            key = (id(program), shapes, own, torch.is_grad_enabled(), _autocast(), *_devices(leaves))
            if key not in self._chosen:
                choice, self._chosen[key] = choose(program, values, self._put_back)
                self.choices.append(choice)
            if known is not None:
                self._ready[known] = own, self._chosen[key]
            return self._out(self._chosen[key](values))
        return self._out(program.run(values))

    def _known(self, args: tuple[Any, ...]) -> Any:
        """What a choice depends on, where all arguments are tensors; else None."""
        if self.backend != "auto" or not all(type(arg) is Tensor for arg in args) or is_watched():
            return None
        kinds = tuple([(arg.shape, arg.dtype, arg.device) for arg in args])
        return (kinds, self._version, torch.is_grad_enabled(), _autocast())

    def _own_leaves(self, call: trace.Call, leaves: list[Any], shapes: Any) -> tuple[bool, ...]:
        key = (call.spec, shapes, self._version)
        if key not in self._per_model:
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.ndim == 0 and self.shared is False:
                    raise InputError("input: expected a models' axis, got a tensor without axes")
            self._per_model[key] = is_per_model(self._shells[0], leaves, call.spec, self.num_models, self.shared)
        return self._per_model[key]

    def _put_back(self) -> AbstractContextManager[None]:
        return put_back(self, self._generators)

    def _program(self, call: trace.Call, values: list[Any], shapes: Any, own: tuple[bool, ...]) -> Program | None:
        """The program for this kind of call, or None where nothing can trace it."""
        try:
            key: Any = (call.spec, call.constants, self._version)
            hash(key)
        except TypeError:
            key = (call.spec, repr(call.constants), self._version)
        if key not in self._programs:
            self._programs[key] = self._traced_symbolically(values, call.spec)
        program = self._programs[key]
        if program is not None:
            return program
        key = (key, shapes, own)
        if key not in self._programs:
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
                self._chosen.clear()
                self._ready.clear()
            self._programs[key] = None if is_watched() else self._traced_by_export(values, call.spec)
        return self._programs[key]

    def _sample(self, values: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the first model sees them."""
        first = [value.tensor[0].detach() if isinstance(value, Stacked) else value for value in values]
        args, kwargs = pytree.tree_unflatten(first, spec)
        return args, kwargs

    def _traced_symbolically(self, values: list[Any], spec: Any) -> Program | None:
        args, kwargs = self._sample(values, spec)
        plain = self._plain(0)
        try:
            traced = trace.symbolic(plain, args, kwargs, frozenset(self._separate_index))
        except (torch.fx.proxy.TraceError, *trace.FAILURES) as error:
            self._why_not = f"{type(error).__name__}: {error}"
            return None
        return make_program(self, traced)

    def _traced_by_export(self, values: list[Any], spec: Any) -> Program | None:
        if self._separate_index:
            raise InputError(
                "blocks stay separate, and torch.fx cannot trace the model around them: "
                f"{self._why_not.splitlines()[0]}; use backend='loop', or models that agree in every layer"
            )
        args, kwargs = self._sample(values, spec)
        plain = self._plain(0)
        try:
            with self._put_back():
                traced = trace.exported(plain, args, kwargs)
        except (torch._dynamo.exc.TorchDynamoException, *trace.FAILURES) as error:
            self._why_not += f"; {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return None
        return make_program(self, traced)

    def _whole(self, values: list[Any], spec: Any) -> Any:
        """Where no tracer can follow: the model as one op, by vmap, else model by model."""
        step = Step(0, "", type(self._shells[0]).__name__, _no_rule, (), {}, ["rule"])
        if not is_watched():
            Program._tell(_Teller(self), step)  # type: ignore[arg-type]
        plain = not self._separate_index and self._seeds is None and not _pads(self._shells[0])
        if plain and not self._goes_one_by_one:
            args, kwargs = pytree.tree_unflatten(values, spec)
            tensors = {name: self.tensor(name) for name in self._places}
            shell = self._shells[0]
            try:
                return fallback.vmap(lambda own, *a, **k: _call_with(shell, own, a, k), (tensors, *args), kwargs)
            except trace.FAILURES:
                self._goes_one_by_one = True
        return self._one_by_one(values, spec)

    def _one_by_one(self, values: list[Any], spec: Any) -> Any:
        """The plain models one after another, on views of the stacked tensors."""
        args, kwargs = pytree.tree_unflatten(values, spec)
        parts: dict[int, tuple[Tensor, ...]] = {}
        tensors: dict[str, tuple[Tensor, ...]] = {}
        for name in self._places:
            whole = self.tensor(name).tensor
            tensors[name] = parts.setdefault(id(whole), whole.unbind(0))
        targets: list[Callable[..., Any]] = []
        for index, shell in enumerate(self._shells):
            own = {name: each[index] for name, each in tensors.items()}
            for block, place in self._separate_index.items():
                module = self._group(place)[index]
                own |= {f"{block}.{name}": each for name, each in module.named_parameters(remove_duplicate=False)}
                own |= {f"{block}.{name}": each for name, each in module.named_buffers(remove_duplicate=False)}
            targets.append(_Plain(self, shell, own, index))
        return fallback.loop(targets, args, kwargs, "the model itself")

    def _out(self, tree: Any) -> Any:
        """Tensors of all models; one that all models share is repeated."""
        if isinstance(tree, Stacked):
            return tree.tensor
        return pytree.tree_map(
            lambda leaf: lead(leaf, self.num_models) if isinstance(leaf, (Stacked, Tensor)) else leaf,
            tree,
            is_leaf=lambda leaf: isinstance(leaf, Stacked),
        )

    # --------------------------------------------------------------------------------------------- loss

    def loss(self, fn: Callable[..., Any], out: Any, target: Any, *args: Any) -> Tensor:
        """The loss of each model, ``(B,)``; its ``backward()`` gives each model its own gradient.

        Args:
            fn: any loss function or module of one model's output and target.
            out: what the array gave, ``(B, N, ...)``.
            target: ``(B, N, ...)``, or ``(N, ...)`` for all models.
            args: more arguments of `fn`.

        Example:
            >>> array = Array([nn.Linear(3, 2), nn.Linear(3, 2)])
            >>> loss = array.loss(nn.functional.mse_loss, array(torch.ones(5, 3)), torch.zeros(5, 2))
            >>> loss.shape
            torch.Size([2])
            >>> loss.backward()
        """
        return per_model_loss(fn, out, target, args, self.num_models)

    # -------------------------------------------------------------------------------------- plain modules

    def _plain(self, index: int) -> nn.Module:
        """Model `index` as a plain module with tensors of its own."""
        shell = self._shells[index]
        memo: dict[int, Any] = {}
        for name, hollow in _named_tensors(shell):
            if id(hollow) in memo or name not in self._places:
                continue
            whole = self.tensor(name).tensor
            own = whole.detach()[index].clone()
            is_parameter = isinstance(hollow, nn.Parameter)
            memo[id(hollow)] = nn.Parameter(own, requires_grad=whole.requires_grad) if is_parameter else own
        for block, place in self._separate_index.items():
            memo[id(shell.get_submodule(block))] = copy.deepcopy(self._group(place)[index])
        plain = copy.deepcopy(shell, memo)
        for module in plain.modules():
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
        for parameter in plain.parameters():
            if hasattr(parameter, "_hocket_model"):
                del parameter._hocket_model
        return plain

    def unfuse(self) -> list[nn.Module]:
        """B plain modules of the user's class, with parameters and buffers of their own.

        Example:
            >>> array = Array([nn.Linear(3, 2), nn.Linear(3, 2)])
            >>> [type(model).__name__ for model in array.unfuse()]
            ['Linear', 'Linear']
        """
        return [self._plain(index) for index in range(self.num_models)]

    def drop(self, model: int) -> nn.Module:
        """Take one model out, in place, and give it back as a plain module. Optimizers have to drop its state too.

        Parameters keep their identity; their first axis is one shorter, and their gradients are gone.
        """
        self._check_slot(model)
        if self.num_models == 1:
            raise InputError("drop: only one model is left")
        plain = self._plain(model)
        keep = [index for index in range(self.num_models) if index != model]
        for store, leaf in dict.fromkeys(self._places.values()):
            tensor: Any = getattr(store, leaf)
            kept = tensor.detach()[keep].clone()
            if isinstance(tensor, nn.Parameter):
                tensor.grad = None
                _replace(tensor, kept)
                tensor._hocket_models = len(keep)  # type: ignore[attr-defined]
            else:
                store._buffers[leaf] = kept
        for number in range(len(self.separate)):
            group = self._group(number)
            self.separate[number] = nn.ModuleList([group[index] for index in keep])
            _mark(self._group(number))
        self._shells = [self._shells[index] for index in keep]
        if self._seeds is not None:
            self._seeds = [self._seeds[index] for index in keep]
        self._generators = {device: tuple(each[index] for index in keep) for device, each in self._generators.items()}
        self.num_models = len(keep)
        self._forget()
        return plain

    def refill(self, model: int, new: nn.Module, *, seed: int | None = None) -> nn.Module:
        """Put another model into a slot, in place, and give the old one back as a plain module.

        Args:
            model: the slot.
            new: a module that could have been fused with the others.
            seed: of its random numbers; needed where the array has seeds.

        Raises:
            InputError: the new model does not fit.
        """
        self._check_slot(model)
        if self._seeds is not None and seed is None:
            raise InputError("refill: seed: expected a number, because the other models have seeds")
        old = self._plain(model)
        others = [self._plain(index) for index in range(self.num_models) if index != model][:1] or [old]
        blocks = compare([*others, new], [*self._separate_index])
        extra = set(blocks.separate) - set(self._blocks.separate)
        if extra:
            named = "; ".join(f"{name}: {blocks.separate[name]}" for name in sorted(extra))
            raise InputError(f"refill: the new model differs from the others: {named}")
        tensors = dict(_named_tensors(new))
        with torch.no_grad():
            for name in self._places:
                whole = self.tensor(name).tensor
                whole[model].copy_(tensors[name])
                if whole.grad is not None:
                    whole.grad[model].zero_()
            for block, place in self._separate_index.items():
                module = copy.deepcopy(new.get_submodule(block))
                group = self._group(place)
                group[model] = module
                self.separate[place] = nn.ModuleList(group)
                _mark(group)
        self._shells[model] = _shell(new, model)
        self._shells[model].train(self.training)
        if self._seeds is not None and seed is not None:
            self._seeds[model] = int(seed)
            for generators in self._generators.values():
                generators[model].manual_seed(int(seed))
        self._forget()
        return old

    def _check_slot(self, model: int) -> None:
        if isinstance(model, bool) or not isinstance(model, int) or not 0 <= model < self.num_models:
            raise InputError(f"model: expected a slot from 0 to {self.num_models - 1}, got {model!r}")

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        model: int | None = None,
    ) -> dict[str, Any]:
        """The states of the plain modules: ``"0.fc.weight"``, ``"1.fc.weight"``, ..., as of a list of modules.

        Args:
            args: as of `torch.nn.Module.state_dict`.
            destination: as there.
            prefix: as there.
            keep_vars: as there.
            model: give the state of this model alone, with its own names.
        """
        if args:
            given: Any = (*args, *(destination, prefix, keep_vars)[len(args) :])
            destination, prefix, keep_vars = given
        found: dict[str, Any] = OrderedDict() if destination is None else destination
        if model is not None:
            self._check_slot(model)
        for index in range(self.num_models) if model is None else [model]:
            own = f"{prefix}{index}." if model is None else prefix
            for name, tensor in self._state_of(index):
                found[own + name] = tensor if keep_vars else tensor.detach()
        return found

    def _state_of(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors (views of the stacked ones) that a plain module's state holds."""
        for name in self._shells[index].state_dict(keep_vars=True):
            if name in self._places:
                yield name, self.tensor(name).tensor[index]
                continue
            for block, place in self._separate_index.items():
                if name.startswith(block + "."):
                    own = self._group(place)[index].state_dict(keep_vars=True)
                    yield name, own[name.removeprefix(block + ".")]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = set()
        with torch.no_grad():
            for index in range(self.num_models):
                for name, tensor in self._state_of(index):
                    key = f"{prefix}{index}.{name}"
                    expected.add(key)
                    if key not in state_dict:
                        missing_keys.append(key)
                    elif state_dict[key].shape != tensor.shape:
                        given = tuple(state_dict[key].shape)
                        error_msgs.append(f"{key}: expected shape {tuple(tensor.shape)}, got {given}")
                    else:
                        tensor.copy_(state_dict[key])
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in expected]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` gave.

        Raises:
            InputError: `assign` is True (stacked parameters keep their identity).
            RuntimeError: keys or shapes do not match, as of any module.
        """
        if assign:
            raise InputError("load_state_dict: assign=True is not possible: the models' tensors are stacked")
        missing: list[str] = []
        unexpected: list[str] = []
        errors: list[str] = []
        self._load_from_state_dict(state_dict, "", {}, strict, missing, unexpected, errors)
        if strict:
            errors += [f"missing: {', '.join(missing)}"] * bool(missing)
            errors += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
        if errors:
            raise RuntimeError("while loading the states of fused models: " + "; ".join(errors))
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def train(self, mode: bool = True) -> Array:
        """Set all models to training, or to evaluation."""
        super().train(mode)
        for shell in self._shells:
            shell.train(mode)
        self._version = 1 if mode else 2
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Array:
        super()._apply(fn, recurse)
        for param in self.fused.parameters():
            param._hocket_models = self.num_models  # type: ignore[attr-defined]
        for place in range(len(self.separate)):
            _mark(self._group(place))
        for shell in self._shells:
            _match_dtypes(self, shell)
        self._forget()
        return self

    def _forget(self) -> None:
        self._hocket_version += 1
        self._goes_one_by_one = False
        self._programs.clear()
        self._chosen.clear()
        self._ready.clear()
        self._per_model.clear()
        self.gradient_memory = GradientMemory()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state |= {"_programs": {}, "_chosen": {}, "_ready": {}, "_per_model": {}, "gradient_memory": GradientMemory()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter in self.fused.parameters():  # a copied parameter does not take its marks along
            parameter._hocket_models = self.num_models  # type: ignore[attr-defined]
        for group in self.separate:
            _mark(list(group.children()))

    # ----------------------------------------------------------------------------------------------- report

    def report(self) -> str:
        """What fused, line by line: layer, op, and what computed it in the last call.

        Example:
            >>> array = Array([nn.Sequential(nn.Linear(3, 2), nn.ReLU()) for _ in range(2)], backend="rule")
            >>> _ = array(torch.ones(5, 3))
            >>> print(array.report())
            2 models, 2 ops: 2 by rule
            0  linear  rule
            1  relu    rule
        """
        from hocket.fuse.report import report

        return report(self)


class _Plain:
    """One model on its part of the stacked tensors, drawing from its own generator where it has one."""

    def __init__(self, array: Array, shell: nn.Module, tensors: dict[str, Tensor], index: int) -> None:
        self._array = array
        self._shell = shell
        self._tensors = tensors
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(iter(self._tensors.values())).device if self._tensors else torch.device("cpu")
        generators = self._array.generators_on(device)
        if not generators:
            return _call_with(self._shell, self._tensors, args, kwargs)
        generator = generators[self._index]
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            usual = (
                torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
            )
            usual.set_state(generator.get_state())
            out = _call_with(self._shell, self._tensors, args, kwargs)
            generator.set_state(usual.get_state())
        return out


def _call_with(shell: nn.Module, tensors: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """Call a shell with these tensors; a buffer that its forward assigns anew is written into its tensor."""

    def write_back(module: nn.Module, _: Any, __: Any) -> None:
        for name, value in module.named_buffers(remove_duplicate=False):
            if name in tensors and value is not tensors[name]:
                tensors[name].copy_(value)

    handle = shell.register_forward_hook(write_back)
    try:
        return torch.func.functional_call(shell, tensors, args, kwargs)
    finally:
        handle.remove()


class _Teller:
    def __init__(self, owner: Array) -> None:
        self.owner = owner


def _no_rule(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented


def _pads(model: nn.Module) -> bool:
    """Whether a model has padding rows, which get a gradient under torch's vmap (as of 2.13) that they should not."""
    return any(getattr(module, "padding_idx", None) is not None for module in model.modules())


def _replace(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, while graphs of earlier steps may still be alive.

    Such a graph keeps the node that accumulates the gradient, with the old shape. torch makes a new node only when the
    type of the data changes, so it does, for a moment.
    """
    other = torch.float64 if data.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty_like(data, dtype=other)
    parameter.data = data


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _shell(model: nn.Module, index: int) -> nn.Module:
    """A copy of a model whose parameters and buffers hold no data (they are on the meta device)."""
    memo: dict[int, Any] = {}
    for _, tensor in _named_tensors(model):
        hollow = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(hollow, requires_grad=tensor.requires_grad) if is_parameter else hollow
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"model {index}: cannot be copied: {error}") from error


def _match_dtypes(array: Array, shell: nn.Module) -> None:
    """After ``double()`` and the like."""
    for name, hollow in _named_tensors(shell):
        if name in array._places:
            dtype = array.tensor(name).tensor.dtype
            if hollow.dtype != dtype:
                hollow.data = torch.empty_like(hollow, dtype=dtype)


def _mark(modules: list[nn.Module]) -> None:
    """Say of each parameter of separate modules which model it belongs to."""
    for index, module in enumerate(modules):
        for param in module.parameters():
            param._hocket_model = index  # type: ignore[attr-defined]


def _required_arguments(model: nn.Module) -> tuple[Any, ...]:
    """A tensor for each argument that a forward must have."""
    import inspect

    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(torch.empty(0) for each in parameters if each.kind in kinds and each.default is each.empty)


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _devices(leaves: list[Any]) -> tuple[str, ...]:
    return tuple(str(leaf.device) for leaf in leaves if isinstance(leaf, Tensor))
