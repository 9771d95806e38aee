"""Ways in which a forward looks at its input, parameters, config and environment, and in which it writes state.

A `Piece` is a few lines of a forward over the value ``h`` (`lines`), or an expression that a frame puts to use: a
condition (`test`), or a number between 0 and 3 (`number`). In texts ``{k}`` is the number of the piece in its program,
``{v}`` the tensor it looks at, ``{c}`` the place of a config object, ``{x}`` and ``{new}`` a number.
"""

from __future__ import annotations

from dataclasses import dataclass

IMPORTS = """
import array, collections, collections.abc, contextlib, contextvars, copy, dataclasses, decimal, enum, fractions
import functools, inspect, itertools, math, numbers, operator, os, random, types, datetime
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""


@dataclass(frozen=True)
class Piece:
    """One way of looking.

    Attributes:
        name: unique.
        group: class of ways; the first nine are those of the issue that led to this fuzzer.
        lines, test, number: one of the three; see the module.
        top: lines at the top level of the user's file.
        init: lines of ``__init__``; ``i`` is the number of the model, ``held`` what all models of a run share.
        change: lines run between two calls; ``models`` and ``held`` are those of the run, ``n`` the number of the call.
        draws: "torch" draws from torch's generator, which models share unless they have seeds.
    """

    name: str
    group: str
    lines: str = ""
    test: str = ""
    number: str = ""
    top: str = ""
    init: str = ""
    change: str = ""
    draws: str = ""


# Frames around a test, and around a number.
FRAMES = {
    "if": "if {t}:\n    h = h * 1.5\nelse:\n    h = h.flip(1) - 0.5",
    "ternary": "h = torch.sin(h) if {t} else torch.cos(h)",
    "sum": "h = h * (1.5 + bool({t}))",
    "table": "h = {True: torch.tanh, False: torch.sigmoid}[bool({t})](h)",
    "match": "match bool({t}):\n    case True:\n        h = h + 0.25\n    case _:\n        h = h.abs()",
    "early": "for _ in range(3):\n    h = h * 0.75 + 0.1\n    if {t}:\n        break",
    "except": "try:\n    f{k} = bool({t})\nexcept Exception:\n    f{k} = -1.5\nh = h * (0.5 + f{k})",
    "bare": "try:\n    h = h + 1.0 if {t} else h - 1.0\nexcept:\n    h = -h",
    "named": "try:\n    f{k} = bool({t})\nexcept (RuntimeError, TypeError, ValueError, AttributeError):\n"
    "    f{k} = False\n    h = -h\nh = h * (0.5 + f{k})",
    "suppress": "f{k} = -1.0\nwith contextlib.suppress(Exception):\n    f{k} = 0.5 + bool({t})\nh = h * f{k}",
    "finally": "f{k} = 0.5\ntry:\n    f{k} += bool({t})\nfinally:\n    h = h * f{k}",
}
USES = {
    "times": "h = h * {r}",
    "branch": "h = h.flip(1) * 1.5 if {r} > 1.2 else h - 0.5",
    "plus": "h = h + 0.5 * {r}",
    "slope": "h = F.leaky_relu(h, float({r}))",
    "range": "for _ in range(int(2 * {r})):\n    h = torch.tanh(h) + 0.1",
    "clamp": "h = h.clamp(-float({r}), float({r}))",
    "caught": "try:\n    h = h * float({r})\nexcept Exception:\n    h = -h",
}
VALUES = ("x", "h", "self.a.weight", "self.scale")


def _tests(group: str, text: str) -> list[Piece]:
    return [Piece(test.strip(), group, test=test.strip()) for test in text.split(";;")]


_SEES = """
isinstance({v}, torch.Tensor) ;; isinstance({v}, (int, torch.Tensor)) ;; torch.is_tensor({v}) ;;
type({v}) in (torch.Tensor, nn.Parameter) ;; {v}.__class__.__name__ in ("Tensor", "Parameter") ;;
issubclass(type({v}), torch.Tensor) ;; hasattr({v}, "no_such_name") ;; getattr({v}, "no_such_name", None) is None ;;
callable({v}) ;; isinstance({v}, collections.abc.Iterable) ;; isinstance({v}, numbers.Number) ;;
type({v}).__module__.startswith("torch") ;; hasattr({v}, "__array__") ;; torch.overrides.is_tensor_like({v}) ;;
inspect.isfunction({v}.sum) ;; "no_such_name" in dir({v}) ;; {v} is not None and {v} is {v} ;;
any({v} is each for each in [{v}]) ;; id({v}) in {id({v}): 1} ;; isinstance({v}.shape, torch.Size) ;;
type({v}.shape[0]) is int ;; isinstance({v}.size(0), int) ;; {v}.shape in {torch.Size((5, 4)), torch.Size((6, 4))} ;;
{(4, 4): True, (5, 4): False}.get(tuple({v}.shape), True) ;; {1: False, 2: True}[{v}.ndim] ;; {v}.dim() == 2 ;;
len({v}) > 4 ;; len({v}.shape) == 2 ;; {v}.shape[0] % 2 == 1 ;; {v}.numel() > 18 ;;
(lambda rows, columns: rows > columns)(*{v}.shape) ;; [*{v}.size()][0] > 4 ;; np.shape({v})[0] > 4 ;;
math.prod({v}.shape) > 18 ;; "5" in str(tuple({v}.shape)) ;; f"{{v}.shape[0]}x{{v}.shape[1]}" == "5x4" ;;
sum(1 for _ in {v}) > 4 ;; len(list(zip({v}, range(100)))) > 4 ;; [place for place, _ in enumerate({v})][-1] > 3 ;;
{v}.stride() == (4, 1) ;; {v}.is_contiguous() ;; {v}.T.is_contiguous() ;; {v}.dtype is torch.float32 ;;
{v}.dtype in {torch.float16, torch.float32} ;; {torch.float64: 2, torch.float32: 1}[{v}.dtype] == 1 ;;
str({v}.dtype).endswith("float32") ;; repr({v}.dtype) == "torch.float32" ;; torch.finfo({v}.dtype).bits == 32 ;;
{v}.element_size() == 4 ;; {v}.is_floating_point() and not torch.is_complex({v}) ;; {v}.layout is torch.strided ;;
{v}.device.type == "cpu" ;; {v}.device == torch.device("cpu") ;; "cpu" in str({v}.device) ;;
{v}.is_meta or {v}.is_cuda ;; {v}.get_device() < 0 ;; {v}.requires_grad ;; {v}.is_leaf ;; {v}.grad_fn is None ;;
"Backward" in type({v}.grad_fn).__name__ ;; {v}.is_leaf and {v}.grad is None ;; {v}.is_inference() ;;
repr({v}).startswith(("tensor", "Parameter")) ;; {v}.untyped_storage().nbytes() > 0
"""
_VALUES_SEEN = """
{v}.sum().item() > 0.2 ;; bool({v}.mean() > 0.02) ;; float({v}.detach().max()) > 1.3 ;;
int({v}.detach().abs().max() * 10) % 2 == 0 ;; ({v}.data > 0).sum() > 10 ;; torch.equal({v}, {v}.abs()) ;;
torch.allclose({v}, {v}.round(), atol=0.45) ;; ({v} > 1.5).any() ;; any(value > 1.5 for value in {v}.flatten()) ;;
not ({v} < 2).all() ;; ({v} > 0).nonzero().shape[0] > 10 ;; {v}[{v} > 0].numel() > 10 ;;
torch.masked_select({v}, {v} > 0).shape[0] % 2 == 0 ;; ({v} > 0).sum(0).unique().numel() > 2 ;;
{v}.detach().numpy().sum() > 0 ;; np.asarray({v}.detach())[0, 0] > 0 ;; {v}.tolist()[0][0] > 0 ;;
{v}.argmax().item() % 2 == 0 ;; sorted({v}.flatten().tolist())[3] < 0 ;; {v}[0, 0] > {v}[0, 1] ;;
not ({v}[0] > 0).all() ;; {v}.isnan().any() ;; f"{{v}.sum().item():.3f}".startswith("-") ;; max({v}.flatten()) > 1.4 ;;
math.floor({v}.abs().sum().item()) in range(0, 1000, 2)
"""
_ENVIRONMENT = """
torch.is_grad_enabled() ;; torch.get_default_dtype() is torch.float32 ;; self.training ;;
self.a.training and self.t.training ;; torch.is_autocast_enabled("cpu") ;; torch.get_num_threads() > 0 ;;
torch.are_deterministic_algorithms_enabled() ;; torch.jit.is_scripting() or torch.jit.is_tracing() ;;
torch.compiler.is_compiling() ;; torch._C._are_functorch_transforms_active() ;; torch.is_inference_mode_enabled() ;;
len(torch.overrides._get_current_function_mode_stack()) > 0
"""
_PARAMETERS = """
next(self.parameters()).device == x.device ;; next(self.parameters()).is_meta ;;
isinstance(self.a.weight, nn.Parameter) and isinstance(self.t.bias, nn.Parameter) ;;
dict(self.named_parameters())["a.weight"].shape == (6, 4) ;; sum(each.numel() for each in self.parameters()) > 40 ;;
sum(isinstance(each, nn.Linear) for each in self.modules()) == 2 ;;
[name for name, _ in self.named_children()][:2] == ["a", "t"] ;; "scale" in vars(self)["_buffers"] ;;
all(each.is_leaf for each in self.parameters()) ;; list(self.state_dict())[0] in ("a.weight", "scale") ;;
self.a.weight.norm().item() > 1.5 ;; next(iter(self.parameters())).flatten()[0] > 0 ;;
self.a.weight in set(self.parameters()) ;;
self.a.weight.data_ptr() == dict(self.named_parameters())["a.weight"].data_ptr() ;;
[name for name, _ in self.named_buffers()][0] == "scale"
"""


def _lines(group: str, text: str, init: str = "", top: str = "", name: str = "", **options: str) -> Piece:
    return Piece(name, group, lines=text, init=init, top=top, **options)


_PIECES_OF_LINES = [
    # 1: input
    _lines("sees", "h = self_{k}(h, h)", name="singledispatch",
        top="@functools.singledispatch\ndef self_{k}(v, h):\n    return h - 1.0\n"
        "@self_{k}.register(torch.Tensor)\ndef _(v, h):\n    return h * 1.5"),
    _lines("sees", "h = P{k}().go(x, h)", name="singledispatchmethod",
        top="class P{k}:\n    @functools.singledispatchmethod\n    def go(self, v, h):\n"
        "        return -h\n    @go.register\n    def _(self, v: torch.Tensor, h):\n" "        return h + 0.5"),
    _lines("sees", "match x.shape:\n    case (4 | 5, 4):\n        h = h * 1.5\n    case (rows, _):\n"
        "        h = h - rows", name="match shape"),
    _lines("sees", "match x:\n    case torch.Tensor(ndim=2):\n        h = h * 1.5\n    case _:\n        h = -h",
        name="match class"),
    _lines("sees", "match list(x.shape):\n    case [rows, 4] if rows > 4:\n        h = h * 1.5\n    case _:\n"
        "        h = -h", name="match guard"),
    _lines("sees", "h = torch.stack([row * (1 + 0.1 * place) for place, row in enumerate(h)])", name="rows"),
    _lines("sees", "rows, columns = h.shape\nh = h.reshape(columns, rows).reshape(rows, columns) + rows",
        name="reshape by shape"),
    _lines("sees", "h = h + torch.arange(h.shape[1], dtype=h.dtype, device=h.device) * x.size(0)", name="arange"),
    _lines("sees", "h = {torch.Tensor: torch.sin}.get(type(h), torch.cos)(h)", name="type as key"),
    _lines("sees", "h = sum([h, h])", name="sum of list"),
    # 2: exceptions
    _lines("except", "try:\n    h = h.view(5, -1).view(h.shape) * 1.5\nexcept RuntimeError:\n    h = h - 0.5",
        name="view fails"),
    _lines("except", "try:\n    h = h + torch.ones(5, 1)\nexcept Exception:\n    h = -h", name="broadcast fails"),
    _lines("except", "try:\n    h = h * torch.ones(4, 1)\nexcept:\n    h = h + 2.0", name="bare except"),
    _lines("except", "try:\n    h = h.no_such_method()\nexcept AttributeError:\n    h = h * 1.5", name="attribute"),
    _lines("except", "try:\n    h[7]\n    h = h * 1.5\nexcept IndexError:\n    h = h - 1.0", name="index"),
    _lines("except", "try:\n    s{k} = x.sum().item()\nexcept Exception:\n    s{k} = 3.0\n"
        "h = h * (1.5 if s{k} > 0 else 0.5)", name="item"),
    _lines("except", "try:\n    s{k} = int(x[0, 0] > 0)\nexcept (TypeError, RuntimeError):\n    s{k} = 7\nh = h + s{k}",
        name="int"),
    _lines("except", "s{k} = 5.0\nwith contextlib.suppress(Exception):\n    s{k} = float(x.detach().numpy()[0, 0])\n"
        "h = h + s{k}", name="suppress numpy"),
    _lines("except", "try:\n    ok{k} = torch.equal(x, x)\nexcept BaseException:\n    ok{k} = False\n"
        "h = h if ok{k} else -h", name="base exception"),
    _lines("except", "try:\n    raise ValueError(len(x))\nexcept ValueError as error:\n    h = h + error.args[0]",
        name="own exception"),
    _lines("except", "try:\n    for row in x:\n        h = h + row.sum().item()\n        break\nexcept Exception:\n"
        "    h = -h", name="loop"),
    _lines("except", "try:\n    hash{k} = {x: 1}[x]\nexcept Exception:\n    hash{k} = 4\nh = h * hash{k}",
        name="tensor as key"),
    _lines("raises", "if x.shape[0] == 4:\n    raise ValueError('four rows')\nh = h * 1.5", name="raises by shape"),
    _lines("raises", "if not self.training:\n    raise NotImplementedError\nh = h * 1.5", name="raises in eval"),
    _lines("raises", "assert x.shape[0] in (3, 5), x.shape\nh = h - 0.5", name="asserts"),
    _lines("raises", "h = h + torch.ones(5, 1) if x.shape[0] != 3 else h", name="op fails"),
    # 3: writes through parameters() and buffers()
    _lines("writes",
        "with torch.no_grad():\n    for own, other in zip(self.key{k}.parameters(), self.a.parameters()):\n"
        "        own.data = own.data * 0.5 + other.data * 0.5\nh = h + self.key{k}(x).mean()",
        "self.key{k} = copy.deepcopy(self.a).requires_grad_(False)", name="key encoder by data"),
    _lines("writes", "with torch.no_grad():\n    torch._foreach_mul_(list(self.key{k}.parameters()), 0.5)\n"
        "h = h + self.key{k}(x).mean()", "self.key{k} = copy.deepcopy(self.a).requires_grad_(False)", name="foreach"),
    _lines("writes", "with torch.no_grad():\n    for each in self.t.parameters():\n        each.clamp_(-0.2, 0.2)",
        name="clip all"),
    _lines("writes", "for name, each in self.named_buffers():\n    if name == 'num{k}':\n        each.add_(1)\n"
        "h = h * self.num{k}", "self.register_buffer('num{k}', torch.tensor(1.0))", name="named buffer"),
    _lines("writes", "self._buffers['num{k}'] += 0.5\nh = h + self.num{k}",
        "self.register_buffer('num{k}', torch.tensor(1.0))", name="buffer dict"),
    _lines("writes", "self.state_dict()['num{k}'].add_(0.5)\nh = h + self.num{k}",
        "self.register_buffer('num{k}', torch.tensor(1.0))", name="state dict"),
    _lines("writes", "with torch.no_grad():\n"
        "    v{k} = nn.utils.parameters_to_vector(self.t.parameters()) * 0.9\n"
        "    nn.utils.vector_to_parameters(v{k}, self.t.parameters())",
        name="vector"),
    _lines("writes", "getattr(self, 'scale').data.mul_(0.5)\nh = h + self.scale.mean()", name="data of buffer"),
    _lines("writes", "for layer in self.children():\n    if isinstance(layer, nn.Linear):\n"
        "        layer.weight.data.mul_(0.9)", name="weight decay by layer"),
    _lines("writes", "with torch.no_grad():\n    next(self.t.parameters()).copy_(next(self.t.parameters()) * 0.75)",
        name="copy_"),
    # 4: writes by name, which timed passes must not make
    _lines("named", "with torch.no_grad():\n    self.ema{k}.lerp_(self.a.weight, 0.5)\nh = h + self.ema{k}.sum()",
        "self.register_buffer('ema{k}', self.a.weight.detach().clone())", name="average in a buffer"),
    _lines("named", "self.t.weight.data.mul_(0.9)", name="decay by data"),
    _lines("named", "with torch.no_grad():\n    self.t.bias.add_(0.25)", name="bias"),
    _lines("named", "with torch.no_grad():\n    self.t.weight.sub_(self.t.weight.mean())", name="centred"),
    _lines("named", "self.t.bias.data = self.t.bias.data + 0.5", name="rebound data"),
    _lines("named", "with torch.no_grad():\n    self.t.weight[0] = self.t.weight[1]", name="item of weight"),
    _lines("named", "with torch.no_grad():\n    self.a.weight.renorm_(2, 0, 0.9)\nh = h + self.a(x).mean()",
        name="max norm"),
    _lines("named", "nn.init.constant_(self.t.bias, 0.5 + x.shape[0])", name="init"),
    # 8
    _lines("rate", "h = self.drop{k}(h)", "self.drop{k} = nn.Dropout(float(i % 2))", name="rates by model",
        change="for m in models:\n    m.drop{k}.p = float(n % 2)"),
    _lines("rate", "h = F.dropout(h, self.p{k}, self.training)", "self.p{k} = float(i % 2)", name="functional rate"),
    _lines("rate", "h = F.dropout1d(h.unsqueeze(0), p=self.p{k}).squeeze(0)", "self.p{k} = float(i == 0)",
        name="rate of channels"),
    _lines("rate", "h = F.dropout(h, 0.5, self.training)", name="drawn masks", draws="torch"),
    _lines("rate", "h = F.alpha_dropout(h, self.p{k}, True)", "self.p{k} = 0.0 if i else 0.4", name="alpha",
        draws="torch"),
    # 9
    _lines("loud", "h = h.to(next(self.parameters()).device)", name="to device of first"),
    _lines("loud", "h = h.to(self.a.weight)", name="to like weight"),
    _lines("loud", "h = h + torch.zeros(1, device=next(self.buffers()).device, dtype=self.scale.dtype)",
        name="zeros like buffer"),
    _lines("loud", "h = h.type_as(next(self.parameters())) + torch.ones_like(next(self.parameters())).mean()",
        name="ones like"),
    _lines("loud", "self.num{k} += 1\nh = h * self.num{k}", "self.register_buffer('num{k}', torch.tensor(0))",
        name="counting buffer"),
    _lines("loud", "self.num{k} = self.num{k} + 1\nh = h / self.num{k}",
        "self.register_buffer('num{k}', torch.tensor(0.0))", name="rebound buffer"),
    _lines("loud", "self.num{k}.add_(x.shape[0])\nh = h + self.num{k} * self.a.weight.mean()",
        "self.register_buffer('num{k}', torch.tensor(0.0))", name="count of rows"),
    _lines("loud", "h = h + torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1]", name="jvp"),
    _lines("loud", "h = h + torch.func.grad(lambda v: v.square().sum())(x).mean()", name="func.grad"),
    _lines("loud", "h = h + torch.autograd.grad(torch.sin(h).sum(), h, create_graph=True)[0] if h.requires_grad else h",
        name="autograd.grad"),
    _lines("loud", "h = h + torch.func.vmap(torch.sin)(x).mean()", name="func.vmap"),
    _lines("loud", "self.w{k} = self.a.weight * 2\nh = h + F.linear(x, self.w{k}).mean()\nself.w{k} = None",
        name="weight kept"),
    _lines("loud", "self.a.bias = nn.Parameter(self.a.bias.detach() * 0.5)\nh = h + self.a(x).mean()",
        name="weight set"),
    _lines("loud", "m{k} = h > 0\nh = h.clone()\nh[m{k}] = 0.5", name="mask written"),
    _lines("loud", "h = h + h[h > 0].sum()", name="mask read"),
    _lines("loud", "h = torch.cat([h[x[:, 0] > 0], h[x[:, 0] <= 0]])", name="rows by mask"),
    _lines("loud", "h = h * len(x.shape * self.w{k})", "self.w{k} = 2", name="shape repeated"),
    _lines("loud", "h = h + sum((x.shape + h.shape)[1:])", name="shapes added"),
    _lines("loud", "h = h.new_full(h.shape[:-1] + (1,), self.w{k}) + h", "self.w{k} = 2.0 + i", name="shape made"),
    _lines("loud", "h = h + torch.tensor(x.tolist()).mean() + torch.from_numpy(x.detach().numpy()).max()",
        name="there and back"),
    # state that the forward writes
    _lines("state", "self.v{k} += 1\nh = h * self.v{k}", "self.v{k} = 0", name="counter"),
    _lines("state", "self.v{k} += 1", "self.v{k} = 0", name="counter unread"),
    _lines("state", "h = h + self.last{k} if self.last{k} is not None else h\nself.last{k} = h.detach().mean()",
        "self.last{k} = None", name="last value"),
    _lines("state", "self.v{k}.append(x.shape[0])\nh = h + sum(self.v{k})", "self.v{k} = []", name="list"),
    _lines("state", "if x.shape not in self.v{k}:\n    self.v{k}[x.shape] = torch.full((1,), 1.0 + len(self.v{k}))\n"
        "h = h * self.v{k}[x.shape]", "self.v{k} = {}", name="cache by shape"),
    _lines("state", "if not hasattr(self, 'v{k}'):\n    self.v{k} = 1.0 + x.shape[0]\nh = h + self.v{k}",
        name="first shape"),
    _lines("state", "if self.v{k} is None:\n    self.v{k} = x.detach().mean().item()\nh = h - self.v{k}",
        "self.v{k} = None", name="first value"),
    _lines("state", "global G{k}\nG{k} += 1\nh = h * (1 + G{k} % 3)", top="G{k} = 0", name="global counter"),
    _lines("state", "type(self).v{k} = getattr(type(self), 'v{k}', 0) + 1\nh = h + type(self).v{k}",
        name="class counter"),
    _lines("state", "held{k} = self.held{k}\nheld{k}['n'] += 1\nh = h + held{k}['n']",
        "self.held{k} = vars(held).setdefault('h{k}', {'n': 0})", name="shared counter"),
    _lines("state", "h = h + next(self.v{k})", "self.v{k} = itertools.count(i)", name="iterator"),
    _lines("state", "h = h + next(N{k})", top="N{k} = iter(range(1000))", name="global iterator"),
    _lines("state", "self.v{k}.update([x.shape[0]])\nh = h + self.v{k}[5]", "self.v{k} = collections.Counter()",
        name="tally"),
    _lines("state", "C{k}.set(C{k}.get() + 1)\nh = h + C{k}.get()",
        top="C{k} = contextvars.ContextVar('C{k}', default=0)", name="context"),
    _lines("state", "key{k} = 'LOOKS_' + __name__\nos.environ[key{k}] = os.environ.get(key{k}, '') + 'a'\n"
        "h = h + len(os.environ[key{k}])", name="environ written"),
    _lines("state", "h = h * L{k}(x.shape)",
        top="@functools.lru_cache\ndef L{k}(shape):\n    L{k}.n = getattr(L{k}, 'n', 0) + 1\n"
        "    return 0.5 * L{k}.n", name="lru_cache"),
    _lines("state", "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(self.v{k})\n"
        "    h = h + torch.rand(())\nself.v{k} += 1", "self.v{k} = i", name="seeded noise"),
    # 7: counters in functions
    _lines("default", "h = h * self.f{k}()", "self.f{k} = F{k}", "def F{k}(c=[0]):\n    c[0] += 1\n    return c[0] % 3",
        name="list as default"),
    _lines("default", "h = h * self.f{k}()", "self.f{k} = F{k}",
        "def F{k}(*, c={'n': 0}):\n    c['n'] += 1\n    return c['n'] % 3", name="dict as keyword default"),
    _lines("default", "h = h + self.f{k}[0]()", "self.f{k} = (functools.partial(F{k}, [0]),)",
        "def F{k}(c):\n    c[0] += 1\n    return c[0]", name="list in a partial"),
    _lines("default", "h = h + self.f{k}()", "self.f{k} = F{k}()",
        "def F{k}():\n    c = 0\n    def f():\n        nonlocal c\n        c += 1\n        return c\n" "    return f",
        name="cell"),
    _lines("default", "h = h + self.f{k}()", "self.f{k} = F{k}",
        "def F{k}():\n    F{k}.n += 1\n    return F{k}.n\nF{k}.n = 0", name="function attribute"),
    _lines("default", "h = h + self.f{k}()", "self.f{k} = F{k}()",
        "class F{k}:\n    n = 0\n    def __call__(self):\n        self.n += 1\n        return self.n",
        name="callable object"),
    _lines("default", "h = self.f{k}(h)", "self.f{k} = lambda v, c=[1.0]: (c.append(c[-1] + 0.5), v * c[-1])[1]",
        name="lambda"),
    # environment
    _lines("environment", "h = h * random.random()", name="random"),
    _lines("environment", "h = h * 1.5 if random.randrange(2) else -h", name="random branch"),
    _lines("environment", "h = h + np.random.rand()", name="numpy random"),
    _lines("environment", "h = h * self.r{k}.random()", "self.r{k} = random.Random(i)", name="own random"),
    _lines("environment", "h = h + float(self.r{k}.random())", "self.r{k} = np.random.default_rng(i)",
        name="own generator"),
    _lines("environment", "h = h + torch.randn_like(h)", name="noise", draws="torch"),
    _lines("environment", "h = h * 1.5 if torch.rand(()) < 0.5 else -h", name="noise branch", draws="torch"),
    _lines("environment", "h = h + torch.full((1,), 0.5)", name="default dtype",
        change="torch.set_default_dtype((torch.float32, torch.float64)[n % 2])"),
    Piece("environ", "environment", number="float(os.environ.get('LOOKS_E{k}', '1.5'))",
        change="os.environ['LOOKS_E{k}'] = str({new})"),
    Piece("getenv", "environment", number="float(os.getenv('LOOKS_E{k}') or 1.5)",
        change="os.environ.update(LOOKS_E{k}=str({new}))"),
    Piece("in environ", "environment", test="'LOOKS_E{k}' in os.environ",
        change="os.environ.setdefault('LOOKS_E{k}', 'a') and (n % 2 or os.environ.pop('LOOKS_E{k}'))"),
]  # fmt: skip

PIECES = (
    *_tests("sees", _SEES),
    *_tests("values", _VALUES_SEEN),
    *_tests("environment", _ENVIRONMENT),
    *_tests("parameters", _PARAMETERS),
    *_PIECES_OF_LINES,
)
