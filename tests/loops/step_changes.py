"""Changes of a training program between two of its steps, as lines of source, and how they are taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Change:
    """Lines that change something after one step, and lines that undo it after a later one.

    Attributes:
        rounds: what follows may round otherwise than eager, within the tolerance of the comparison.
    """

    do: tuple[str, ...]
    undo: tuple[str, ...] = ()
    rounds: bool = False


# Values that a number may become.
_VALUES = (
    *("None", "'0.5'", "True", "False", "1", "0", "2", "0.25", "1.5", "0.75", "-0.0", "float('nan')", "float('inf')"),
    *("0.5j", "np.float64(0.5)", "np.float32(0.5)", "torch.tensor(0.5)", "torch.tensor([0.5])", "10 ** 30", "(0.5,)"),
)
_HIDDEN = (
    *("None", "torch.zeros(hidden_shape)", "torch.ones(hidden_shape).double()", "torch.ones(1)", "torch.tensor(0.5)"),
    *("0.0", "torch.ones(*hidden_shape[:-1], 2 * hidden_shape[-1])[..., ::2]", "torch.zeros(5, 5, 5)", "'h'"),
    *("torch.ones(hidden_shape, requires_grad=True)", "net.out.weight.detach()"),
    "nn.Parameter(torch.ones(hidden_shape))",
)
_UNTIE = "net.b.weight.data = net.b.weight.data.clone()"
_GROUP = "optimizer.param_groups[0]"
_COUNT = "s.__setitem__('hooks', s.get('hooks', 0) + 1)"
_LAYOUTS = (
    "net.to(memory_format=torch.channels_last)",
    "{w}.data = {w}.data.transpose(0, 1).contiguous().transpose(0, 1)",
    "{w}.data = torch.cat([{w}.data.reshape(-1), torch.zeros(3)])[:{w}.numel()].view({w}.shape)",
    "{w}.data = torch.cat([torch.zeros(3), {w}.data.reshape(-1)])[3:].view({w}.shape)",
    "{w}.data = {w}.data.clone()",
    "with torch.no_grad():\n    {w}.set_({w}.detach().transpose(0, 1).contiguous().transpose(0, 1))",
    "{w}.data = {w}.data[..., :1].expand({w}.shape)",
    "{w}.data = torch.stack([{w}.data, {w}.data], -1)[..., 0]",
    "{l}.double()",
    "{l}.bfloat16()",
    "{w}.data = {w}.data.double()",
    "{w}.data = {w}.data.abs().requires_grad_(False)",
    "for state in optimizer.state.values():\n"
    "    for key, value in list(state.items()):\n"
    "        if isinstance(value, torch.Tensor) and value.dim() == 2:\n"
    "            state[key] = value.t().contiguous().t()",
    "if {w}.grad is not None:\n    {w}.grad = {w}.grad.transpose(0, 1).contiguous().transpose(0, 1)",
)
_MODES = (
    *("torch.no_grad()", "torch.inference_mode()", "Functions()", "Ops()", "Scaling()", "Halving()"),
    *("torch.autocast('cpu', torch.bfloat16)", "torch.autocast('cpu', enabled=False)", "torch.enable_grad()"),
    *("torch.autograd.detect_anomaly()", "torch.backends.mkldnn.flags(enabled=False)", "warnings.catch_warnings()"),
    *("torch.device('cpu')", "torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t * 0.5)"),
    *("torch.autograd.set_multithreading_enabled(False)", "torch.random.fork_rng()", "Functions(), Ops()"),
    *("warnings.catch_warnings(record=True)", "torch.autograd.graph.save_on_cpu()"),
    *("torch.autograd.profiler.profile()", "torch.autograd.grad_mode.set_multithreading_enabled(True)"),
    "torch._C.DisableTorchFunctionSubclass()",
)
_HOOKS = (
    "{l}.register_forward_hook(lambda m, i, o: o)",
    "net.a.register_forward_hook(lambda m, i, o: 0.5 * o)",
    f"{{l}}.register_forward_hook(lambda m, i, o: {_COUNT})",
    f"{{l}}.register_forward_pre_hook(lambda m, i: {_COUNT})",
    "net.b.register_forward_pre_hook(lambda m, i: (0.5 * i[0],))",
    "net.a.register_full_backward_hook(lambda m, i, o: None)",
    f"net.b.register_full_backward_pre_hook(lambda m, o: {_COUNT})",
    "net.a.weight.register_hook(lambda g: 0.5 * g)",
    f"net.a.weight.register_hook(lambda g: {_COUNT})",
    f"net.b.weight.register_post_accumulate_grad_hook(lambda p: {_COUNT})",
    "net.b.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))",
    f"optimizer.register_step_post_hook(lambda o, a, k: {_COUNT})",
    "optimizer.register_step_pre_hook(lambda o, a, k: (net.a.weight.grad.mul_(0.5), None)[1])",
    f"nn.modules.module.register_module_forward_hook(lambda m, i, o: {_COUNT})",
    "nn.modules.module.register_module_forward_pre_hook(lambda m, i: None)",
    f"torch.optim.optimizer.register_optimizer_step_post_hook(lambda o, a, k: {_COUNT})",
    "net.a.register_forward_hook(lambda m, i, o: 1 / 0)",
    "net.a.weight.register_hook(lambda g: 1 / 0)",
)
_BATCHES = (
    *("x[:1], y[:1]", "torch.cat([x, x]), torch.cat([y, y])", "x.double(), y.double()", "x.bfloat16(), y", "x, None"),
    *("x * float('nan'), y", "x * float('inf'), y", "x * 0, y", "x[:0], y[:0]", "x.clone(), y.clone()"),
    *("x + 100, y", "x, y + 100", "x.flip(0), y", "x.transpose(0, -1).contiguous().transpose(0, -1), y"),
    *("x[:1].expand(x.shape), y", "x.clone().requires_grad_(x.is_floating_point()), y", "x, x", "x, y, y"),
    *("torch.stack([x, x], -1)[..., 0], y", "torch.cat([x[:1], x])[1:], y", "x.tolist(), y", "x.int(), y.int()"),
    *("torch.nn.Parameter(x * 1.0), y", "x.unsqueeze(0), y", "x.to_sparse(), y", "np.asarray(x), y"),
)

# By kind, what may be done between two steps and what undoes it. `{l}` is one of the kind's layers, `{w}` its weight.
TABLES: dict[str, tuple[tuple[str, str], ...]] = {
    "layout": tuple(
        (line, "net.float()\n{w}.data = {w}.data.clone(memory_format=torch.contiguous_format)") for line in _LAYOUTS
    ),
    "alias": (
        ("net.b.weight.data = net.a.weight.data", _UNTIE),
        ("kept = net.b\nnet.b = net.a", "net.b = kept"),
        ("kept = net.b.weight\nnet.b.weight = net.a.weight", "net.b.weight = kept"),
        ("net.b.weight.data = net.a.weight.data.view(-1).flip(0).view(net.a.weight.shape)", _UNTIE),
        (
            "flat = torch.cat([net.a.weight.data.reshape(-1), net.b.weight.data.reshape(-1)[1:]])\n"
            "size = net.a.weight.numel()\n"
            "net.a.weight.data = flat[:size].view(net.a.weight.shape)\n"
            "net.b.weight.data = flat[size - 1:].view(net.a.weight.shape)",
            _UNTIE,
        ),
        (
            "if net.a.weight.grad is not None:\n    net.b.weight.grad = net.a.weight.grad",
            "net.b.weight.grad = None",
        ),
        (
            "for p in (net.a.weight, net.b.weight):\n"
            "    for key, v in optimizer.state.get(net.a.weight, {}).items():\n"
            "        optimizer.state[p][key] = v",
            "optimizer.state = copy.deepcopy(optimizer.state) if False else optimizer.state",
        ),
        ("s['h'] = net.a.weight.detach()[0]", "s['h'] = None"),
        ("data[0] = data[1]", ""),
        ("net.kept = net.a.weight", "del net.kept"),
    ),
    "switch": (
        ("torch.autograd.set_detect_anomaly(True)", "torch.autograd.set_detect_anomaly(False)"),
        ("torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)"),
        ("torch.use_deterministic_algorithms(True, warn_only=True)", "torch.use_deterministic_algorithms(False)"),
        ("torch.backends.mkldnn.enabled = False", "torch.backends.mkldnn.enabled = True"),
        ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
        ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
        ("torch.set_flush_denormal(True)", "torch.set_flush_denormal(False)"),
        ("torch.set_default_device('cpu')", "torch.set_default_device(None)"),
        ("torch.set_float32_matmul_precision('medium')", "torch.set_float32_matmul_precision('highest')"),
        ("torch.set_autocast_enabled('cpu', True)", "torch.set_autocast_enabled('cpu', False)"),
        ("torch.set_autocast_cache_enabled(False)", "torch.set_autocast_cache_enabled(True)"),
        ("torch.manual_seed(3)", "torch.manual_seed(4)"),
        ("torch.nn.Linear.forward = halved_linear", "torch.nn.Linear.forward = linear_forward"),
        ("torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)", "pass"),
        ("torch.__future__.set_overwrite_module_params_on_conversion(True)", "pass"),
    ),
    "mode": tuple(
        (
            "\n".join(
                [
                    "def enter(stack):",
                    *(f"    stack.enter_context({each})" for each in made.replace("(), ", "()\0").split("\0")),
                    "around['enter'] = enter",
                ]
            ),
            "around.pop('enter', None)",
        )
        for made in _MODES
    ),
    "hook": tuple((f"handles.append({made})", "if handles:\n    handles.pop().remove()") for made in _HOOKS),
    "optimizer": (
        *(
            (f"{_GROUP}['{name}'] = {new}", f"{_GROUP}['{name}'] = {old}")
            for name, new, old in (
                ("lr", "0.02", "0.05"),
                ("lr", "torch.tensor(0.02)", "0.05"),
                ("lr", "0", "0.05"),
                ("lr", "None", "0.05"),
                ("lr", "'x'", "0.05"),
                ("weight_decay", "0.1", "0.0"),
                ("weight_decay", "1", "0"),
                ("momentum", "0.5", "0.9"),
                ("momentum", "0", "0.9"),
                ("nesterov", "True", "False"),
                ("foreach", "True", "False"),
                ("fused", "True", "None"),
                ("maximize", "True", "False"),
                ("amsgrad", "True", "False"),
                ("betas", "(0.8, 0.9)", "(0.9, 0.999)"),
                ("eps", "1e-3", "1e-8"),
                ("dampening", "0.1", "0"),
            )
        ),
        (f"del {_GROUP}['lr']", f"{_GROUP}['lr'] = 0.05"),
        (
            "net.extra = nn.Parameter(torch.ones(2))\noptimizer.add_param_group({'params': [net.extra]})",
            "net.extra.data.zero_()",
        ),
        (f"dropped = {_GROUP}['params'].pop()", f"{_GROUP}['params'].append(dropped)"),
        (f"{_GROUP}['params'].reverse()", f"{_GROUP}['params'].reverse()"),
        ("dropped = optimizer.param_groups.pop()", "optimizer.param_groups.append(dropped)"),
        ("optimizer.state.clear()", "optimizer.state.clear()"),
        ("if optimizer.state:\n    optimizer.state.popitem()", ""),
        ("for state in optimizer.state.values():\n    state.pop('momentum_buffer', None)", ""),
        ("for state in optimizer.state.values():\n    state.pop('exp_avg', None)", "optimizer.state.clear()"),
        ("for state in optimizer.state.values():\n    state['step'] = 7", "optimizer.state.clear()"),
        ("for state in optimizer.state.values():\n    state['momentum_buffer'] = None", ""),
        ("optimizer = torch.optim.SGD(net.parameters(), lr=0.01)", ""),
        ("optimizer = torch.optim.Adam(net.parameters(), lr=0.01)", ""),
        ("saved = copy.deepcopy(optimizer.state_dict())", "optimizer.load_state_dict(saved)"),
        ("optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))", ""),
        ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
    ),
    "gradients": (
        ("{w}.requires_grad_(False)", "{w}.requires_grad_(True)"),
        ("{l}.requires_grad_(False)", "{l}.requires_grad_(True)"),
        ("net.requires_grad_(False)", "net.requires_grad_(True)"),
        ("{w}.grad = None", ""),
        ("{w}.grad = torch.ones_like({w})", "{w}.grad = None"),
        ("{w}.grad = torch.zeros_like({w})", ""),
        ("if {w}.grad is not None:\n    {w}.grad = {w}.grad.clone()", ""),
        ("for p in net.parameters():\n    p.grad = None", ""),
        ("for p in net.parameters():\n    p.grad = torch.ones_like(p)", ""),
        ("if {w}.grad is not None:\n    {w}.grad.requires_grad_()", "{w}.grad = None"),
        ("{w}.retain_grad()", ""),
    ),
    "modules": (
        ("net.eval()", "net.train()"),
        ("net.act.eval()", "net.act.train()"),
        ("kept_act = net.act\nnet.act = nn.Sigmoid()", "net.act = kept_act"),
        ("kept_act = net.act\nnet.act = Halved()", "net.act = kept_act"),
        ("net.act = nn.Dropout(0.5)", "net.act = nn.Tanh()"),
        ("net.act = None", "net.act = nn.Tanh()"),
        ("net.act = torch.tanh", "net.act = nn.Tanh()"),
        ("kept_act = net.act\ndel net.act", "net.act = kept_act"),
        ("kept_b = net.b\nnet.b = copy.deepcopy(net.b)", "net.b = kept_b"),
        ("kept_b = net.b\nnet.b = nn.Identity()", "net.b = kept_b"),
        ("net.b.weight = nn.Parameter(net.b.weight.detach().clone())", ""),
        ("net = copy.deepcopy(net)", ""),
        ("net.load_state_dict({name: 0.5 * value for name, value in net.state_dict().items()})", ""),
        ("net.out.bias = None", ""),
        ("net.act.forward = lambda x: 0.5 * x", "vars(net.act).pop('forward', None)"),
        ("net.register_buffer('further', torch.ones(2))", "del net.further"),
        ("net.a.weight.data.mul_(0.5)", "net.a.weight.data.mul_(2.0)"),
        ("with torch.no_grad():\n    net.a.weight[0].zero_()", ""),
        ("net.__class__ = type('Other', (type(net),), {})", ""),
        ("kept_a = net.a\nnet.a, net.b = net.b, net.a", "net.a, net.b = net.b, net.a"),
    ),
    "parametrized": (
        ("prune.l1_unstructured({l}, 'weight', amount=0.5)", "prune.remove({l}, 'weight')"),
        ("prune.random_unstructured({l}, 'weight', amount=2)", "prune.remove({l}, 'weight')"),
        ("nn.utils.spectral_norm({l})", "nn.utils.remove_spectral_norm({l})"),
        ("nn.utils.weight_norm({l})", "nn.utils.remove_weight_norm({l})"),
        *(
            (f"nn.utils.parametrizations.{name}({{l}})", "nn.utils.parametrize.remove_parametrizations({l}, 'weight')")
            for name in ("weight_norm", "spectral_norm")
        ),
        (
            "nn.utils.parametrize.register_parametrization({l}, 'weight', Halved())",
            "nn.utils.parametrize.remove_parametrizations({l}, 'weight', leave_parametrized=False)",
        ),
    ),
    "batch": tuple((f"alter['batch'] = lambda x, y: ({made})", "alter.pop('batch', None)") for made in _BATCHES),
    # The step gets something else to do, or its data are written to.
    "flags": (
        ("s['fail'] = True", "s['fail'] = False"),
        ("s['fail'] = True", "del s['fail']"),
        ("s['log'] = True", "s['log'] = False"),
        ("s['log'] = 1", "s.pop('log', None)"),
        ("s['seen'] = []", "s['seen'] = None"),
        ("s['seen'].append('x')", "s['seen'].clear()"),
        ("s['calls'] = None", "s['calls'] = 0"),
        ("s['calls'] = 'x'", "s.pop('calls', None)"),
        ("s['count'] = 2.0", "s['count'] = 0"),
        ("data.reverse()", "data.reverse()"),
        ("data[0][0].mul_(2)", "data[0][0].mul_(0)"),
        ("data[1] = tuple(t.clone() for t in data[1])", "data[1] = data[0]"),
        ("s['average'] = None", ""),
    ),
}
_LAYERS = {
    "layout": ("net.a", "net.b", "net.out"),
    "hook": ("net.a", "net.b", "net.act", "net"),
    "gradients": ("net.a", "net.b", "net.out"),
    "parametrized": ("net.a", "net.b"),
}


def change_of(pair: tuple[str, str], layer: str = "net.a") -> Change:
    """A change of a table, made to a layer."""
    do, undo = (text.replace("{w}", f"{layer}.weight").replace("{l}", layer) for text in pair)
    return Change((do,), (undo,) if undo else ())


def tables() -> dict[str, tuple[tuple[str, str], ...]]:
    """All tables, those of a number and of a hidden state included."""
    gone = (("del s['k']", "s['k'] = 0.5"), ("s.clear()", "s.update(k=0.5, h=None, seen=[])"), ("del s['h']", ""))
    numbers = tuple((f"s['k'] = {value}", "s['k'] = 0.5") for value in _VALUES)
    return {**TABLES, "number": (*gone, *numbers), "hidden": tuple((f"s['h'] = {value}", "") for value in _HIDDEN)}


def number(rng: Random, place: str) -> Change:
    """A number becomes something else, or is gone. The old kind comes back later."""
    back = (f"{place} = {rng.choice(('0.5', '0.25', '1.0'))}",)
    kind = rng.random()
    if kind < 0.15 and place in ("s['k']", "box.x", "net.k"):
        return Change((f"del {place}",), back)
    if kind < 0.2:
        return Change(("s.clear()",), ("s.update(k=0.5, h=None, seen=[])",))
    if kind < 0.25 and place == "items[0]":
        return Change(("items.pop()",), ("items.append(0.5)",))
    if kind < 0.4:  # a few in a row
        return Change((f"{place} = {rng.choice(('0.3', '0.6', '0.9'))}",), (f"{place} = {rng.choice(_VALUES)}",))
    return Change((f"{place} = {rng.choice(_VALUES)}",), back)


def hidden(rng: Random, _: str) -> Change:
    place = rng.choice(("s['h']", "box.h", "h"))
    if rng.random() < 0.35 and place != "h":
        gone = {"s['h']": ("s.pop('h', None)", "s.clear()", "del s['h']"), "box.h": ("del box.h", "vars(box).clear()")}
        return Change((rng.choice(gone[place]),), (f"{place} = None",))
    return Change((f"{place} = {rng.choice(_HIDDEN)}",), (f"{place} = None",) if rng.random() < 0.5 else ())


def switch(rng: Random, _: str) -> Change:
    if rng.random() < 0.1:
        return Change(("torch.set_num_threads(2)",), ("torch.set_num_threads(1)",), rounds=True)
    return change_of(rng.choice(TABLES["switch"]))


def batch(rng: Random, _: str) -> Change:
    made = change_of(rng.choice(TABLES["batch"]))
    is_list = rng.choice((False, False, False, True))
    do = made.do[0].replace("y: (", "y: [")[:-1] + "]" if is_list else made.do[0]
    return Change((do,), made.undo)


def _of(kind: str) -> Callable[[Random, str], Change]:
    def chosen(rng: Random, _: str) -> Change:
        layer = rng.choice(_LAYERS[kind]) if kind in _LAYERS else ""
        if kind == "layout":
            undo = "net.float()\nnet.float()" if rng.random() < 0.5 else ""
            made = change_of(rng.choice(TABLES[kind]), layer)
            return Change(made.do, (undo,) if undo else made.undo)
        return change_of(rng.choice(TABLES[kind]), layer)

    return chosen


# By how often they occur.
_KINDS: list[tuple[int, Callable[[Random, str], Change]]] = [
    (6, number),
    (4, hidden),
    (4, _of("layout")),
    (4, _of("alias")),
    (4, switch),
    (4, _of("mode")),
    (4, _of("hook")),
    (5, _of("optimizer")),
    (4, _of("gradients")),
    (4, _of("modules")),
    (2, _of("parametrized")),
    (4, batch),
    (4, _of("flags")),
]
CHANGES = tuple(kind for weight, kind in _KINDS for _ in range(weight))
