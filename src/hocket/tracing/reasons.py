"""Reasons why a step stays eager: one table of them, with the cure for each.

A reason names the user's own line, the object in the user's words, and something that helps. `REASONS` is what
``fast.why`` is made of while a step is recorded, and ``docs/eager.md`` lists the same entries.

A recorder notes reasons and never raises: the user's code may catch an error and go on along a branch that eager does
not take::

    try:
        value = float(loss)     # noted: the value depends on what the step computes, the step gets the true value
    except Exception:
        value = 0.0             # not reached
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hocket.errors import CaptureError
from hocket.pystate.origins import OPTIM, SCALER, runs_torchs, user_line

_DATA = "depends on values, not only on shapes (data-dependent control flow)"
_RETURN = "return the tensor, and look at its value after the step"

# By kind: what the step does, and what helps. {line} is the user's line, {subject} the object in the user's words.
REASONS: dict[str, tuple[str, str]] = {
    "reads a rate": (
        "the optimizer at {line} reads the values of tensors ({subject})",
        "give it rates and betas as numbers; one that decides by losses or weights, as LBFGS and Adafactor do, is no "
        "graph",
    ),
    "reads a scaler": (
        "the step at {line} asks in Python if the scaled gradients are finite",
        "make the optimizer with fused=True: its kernel skips the step by itself",
    ),
    "reads a value": (
        f"the step at {{line}} {_DATA}: {{subject}} reads a tensor's value",
        "keep it a tensor (torch.where), read it before the step, or return it; .item() may be returned or appended "
        "to a list",
    ),
    "looks for nan": (
        "the step at {line} looks for NaN in each gradient (torch.autograd.set_detect_anomaly)",
        "leave it to the runs in which you look for one, or pass check_nan=False",
    ),
    "reads many values": (
        f"the step at {{line}} {_DATA}: it reads {{subject}} values of a tensor",
        "keep them in a tensor, or return it",
    ),
    "computes with an array": (
        "the step at {line} computes with a numpy array where no op of torch is seen",
        "compute with the tensor that torch.from_numpy makes of it",
    ),
    "uses a late number": (
        "the step at {line} reads the value of a tensor and goes on in Python with it",
        f"keep it a tensor, or {_RETURN}; to add, subtract, multiply and keep it is fine",
    ),
    "keeps a number early": (
        "the step at {line} keeps a number that it reads from a tensor before an op that may raise, after it has "
        "written more than is kept in each step",
        "keep the number behind the last such op (a loss with labels, an embedding, an index), or return it",
    ),
    "makes a shape of values": (
        f"the step at {{line}} makes a shape that {_DATA}: {{subject}}",
        "multiply by a mask, or use torch.where, in place of selecting by it; "
        "give ctc_loss lengths that are tensors of the batch",
    ),
    "leaves torch": (
        "the step at {line} takes a tensor out of torch's sight: {subject}",
        f"{_RETURN}; copy one by clone()",
    ),
    "replaces memory": (
        "the step at {line} gives a tensor other memory (tensor.data = new)",
        "write into it: tensor.data.copy_(new)",
    ),
    "catches an error": (
        "the step at {line} may catch what an op raises, after it has written or drawn more than is kept in each step",
        "check the values, before the first op, in place of catching the error",
    ),
    "goes on after an error": (
        "the step at {line} catches what {subject} raises in the recorded steps, and may not raise in others",
        "check the values, before the first op, in place of catching the error",
    ),
    "computes unseen": (
        "the step at {line} hands a number that changes between steps to {subject}, which computes with it before it "
        "reaches an op",
        "use a tensor in place of the number",
    ),
    "steps a scheduler": (
        "the step at {line} calls the step() of a scheduler ({subject})",
        "call it after the training step, not inside it",
    ),
    "computes otherwise": (
        "the step at {line} calls {subject}, which computes otherwise while it is recorded",
        "take the last of cumprod() in place of prod(), svd(x).S, eigh(x)[0] and norms of these, and in place of a "
        "weighted mean of smoothed losses their sum, divided by the sum of the weights",
    ),
    "sets random state": (
        "the step sets the state of the random numbers before {line} (by torch.manual_seed, say); a captured step "
        "draws them one after the other",
        "seed outside the step",
    ),
    "draws from a generator": (
        "{subject} at {line} draws from a generator of its own",
        "use torch's default one, or for hocket.schedule one that was made before the step",
    ),
    "moves memory": (
        "{subject} at {line} changes the memory of a tensor in place; a captured step needs fixed memory",
        "make a new tensor",
    ),
    "uses a layout": (
        "the step at {line} uses a tensor that is not dense ({subject})",
        "use dense tensors (sparse=False, for an embedding)",
    ),
    "wraps tensors": (
        "the step at {line} works on {subject}, whose inner tensors are out of sight",
        "give it the inner tensors, or plan models with sharded parameters alone (torch.compile with our backend)",
    ),
    "shares memory unseen": (
        "the step at {line} uses a view of a tensor that was made out of torch's sight ({subject})",
        "make the view by a function of torch",
    ),
    "calls functions": (
        "the step at {line} calls an op that calls functions ({subject})",
        "write a plain for or if, and draw random numbers outside of torch.cond",
    ),
    "makes state": (
        "the step at {line} makes new state in each call ({subject})",
        "make all state in the first step",
    ),
    "calls a sink": (
        "the step at {line} prints, logs or calls a sink {subject}",
        "do it at the end of the step, with numbers and text",
    ),
    "sets a value": (
        "the step at {line} sets {subject}, which a planned step could not",
        "set it outside the step, or return it",
    ),
    "counts in an op": (
        "an op at {line} that is written in Python sets {subject}: a plan is timed by running its ops on copies",
        "count in the step, next to the op",
    ),
    "returns unseen": (
        "the step at {line} returns (or keeps in a list) a {subject}, whose tensors cannot be seen",
        "return tensors and plain values, in lists, tuples and dicts",
    ),
    "returns replaced": (
        "the step at {line} returns (or keeps in a list) a list or dict that it has replaced by another one",
        "return a copy of it",
    ),
    "returns attributes": (
        "the step at {line} returns {subject}, which a planned step does not set",
        "return it beside the tensor",
    ),
    "returns a graph": (
        "the step at {line} returns {subject} with its autograd graph, for a backward outside of it",
        "call backward and the optimizer inside the step, or return it detached",
    ),
    "retains a gradient": (
        "the step at {line} returns {subject}, which has a gradient, too",
        "return the gradient itself",
    ),
    "trains unseen": (
        "the step at {line} gives {subject} a gradient, which belongs to no model and no optimizer of the schedule",
        "give its model, or an optimizer of it, to hocket.schedule",
    ),
    "trains its batch": (
        "the step at {line} gives {subject} of its batch a gradient, or makes it require one",
        "take x.detach().requires_grad_() in its place",
    ),
    "batch unseen": (
        "the batch of the step at {line} holds a {subject}, whose tensors cannot be seen",
        "pass tensors and plain values, in lists, tuples and dicts",
    ),
    "reads an appended list": (
        "the step at {line} reads {subject}, to which it appends",
        "return what is to be kept, and keep it outside the step",
    ),
    "runs no ops": ("the step at {line} runs no ops", "schedule the function that trains"),
}


@dataclass(frozen=True)
class Reason:
    """One reason."""

    kind: str  # its entry in `REASONS`
    subject: str = ""  # the object, in the user's words
    line: str = ""  # of the user's code, as ``train.py:12``

    def __str__(self) -> str:
        text, cure = REASONS[self.kind]
        return f"{text.format(subject=self.subject, line=self.line)}; {cure}"


class Reasons:
    """Collects the reasons of one recording. The first one counts. With `raises` it is a `CaptureError` at once."""

    def __init__(self, *, raises: bool = False) -> None:
        self.first: Reason | None = None
        self.raises = raises

    def __bool__(self) -> bool:
        return self.first is not None

    @contextmanager
    def of_error(self, op: object) -> Iterator[None]:
        """Note a reason if the op that the block runs raises for its values: the step may catch that, and go on."""
        try:
            yield
        except NotImplementedError:
            raise  # it has no such kernel: it raises in every step
        except Exception:
            self.add("goes on after an error", op)
            raise

    def add(self, kind: str, subject: object = "", line: str | None = None) -> None:
        """Note a reason, at the user's line that is running unless another is given."""
        if kind in ("reads a value", "uses a late number"):
            if runs_torchs(SCALER):
                kind = "reads a scaler"
            elif runs_torchs(OPTIM):
                kind, subject = "reads a rate", subject or "item"
            elif kind == "reads a value" and torch.is_anomaly_check_nan_enabled() and torch.is_anomaly_enabled():
                kind = "looks for nan" if torch._C._current_autograd_node() is not None else kind
        if self.first is None:
            self.first = Reason(kind, str(subject), user_line() if line is None else line)
        if self.raises:
            raise CaptureError(str(self.first))
