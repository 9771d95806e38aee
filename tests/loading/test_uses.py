"""Usual first uses of a model that was just loaded."""

import os
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import ExecutionError
from hocket.ir import Costs, Edge, Graph, Link, Machine, Op
from hocket.loading import finish, load
from hocket.planning.transfers.orders import exact_order
from hocket.planning.transfers.receives import receives_of
from loading.files import HeldBack, Memory, stored
from support.refusals import fails

IN = torch.ones(3)


def made(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


DATA = stored(made(1).state_dict())
EXPECTED = made(1)


def arriving():
    """A model whose weights are on their way."""
    model, reader = made(2), HeldBack(DATA)
    load(model, reader)
    reader.is_asked()
    reader.let_go(100)
    return model


USES = {
    "functional": lambda model: F.linear(IN, model.weight, model.bias),
    "forward itself": lambda model: model.forward(IN),
    "other device or dtype": lambda model: model.to(torch.float64)(IN.double()).float(),
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), IN),
    "compiled model": lambda model: torch.compile(model, backend="eager")(IN),
    "compiled function": lambda model: torch.compile(lambda x: F.linear(x, model.weight, model.bias), backend="eager")(
        IN
    ),
    "exported": lambda model: torch.export.export(model, (IN,)).module()(IN),
    "vector": lambda model: torch.nn.utils.parameters_to_vector(model.parameters()),
    "norm": lambda model: torch.nn.utils.get_total_norm(model.parameters()),
    "shared": lambda model: model.share_memory()(IN),
    "state": lambda model: (
        made().load_state_dict(model.state_dict())
        and torch.cat([tensor.reshape(-1) for tensor in model.state_dict().values()])
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", USES)
def test_it_is_as_with_a_loaded_model(name):
    torch._dynamo.reset()
    # The bits of float64 are other ones, rounded to float32 at the end, for both alike.
    expected = USES[name](made(1))
    model = arriving()
    assert torch.equal(USES[name](model), expected)
    finish(model)


def test_weights_are_normed_from_what_has_arrived():
    normed = torch.nn.utils.parametrizations.weight_norm
    trained, model = normed(made(1)), normed(made(2))
    load(model, Memory(stored(trained.state_dict())))
    assert torch.equal(model(IN), trained(IN))


def test_a_parameter_can_be_made_of_one_that_arrives():
    made_of = torch.nn.Parameter(arriving().weight)
    assert type(made_of) is torch.nn.Parameter
    assert made_of.requires_grad
    assert torch.equal(made_of, EXPECTED.weight)


def test_weights_can_be_written_at_once():
    model = arriving()
    torch.nn.init.zeros_(model.weight)
    assert torch.equal(model(IN), EXPECTED.bias)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told():
    model, reader = made(2), HeldBack(DATA)
    load(model, reader)
    child = os.fork()
    if not child:
        status = 1
        try:
            model(IN)
        except ExecutionError as error:
            status = 0 if "when the process was forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reader.let_go(100)
    assert torch.equal(model(IN), EXPECTED(IN))


def test_a_reader_that_needs_the_model_is_told():
    model = made(2)

    class Circular(Memory):
        def read_at(self, offset, length):
            if len(self.asked) == 2:
                model.bias.sum()
            return super().read_at(offset, length)

    load(model, Circular(DATA))
    fails(ExecutionError, r"reading it needs 'bias', which it has yet to read", model, IN)


@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_no_order_is_better_for_a_forward_than_that_of_first_use(layers, again):
    """Ops run one after another, each with a tensor of its own, or one that was used before (a tied one)."""
    ops = [Op(f"f{at}", role="forward") for at in range(len(layers))]
    recvs = [Op(f"r{at}", role="recv", size_bytes=size) for at, (size, _) in enumerate(layers)]
    edges = [Edge(before.name, after.name) for before, after in pairwise(ops)]
    edges += [Edge(recv.name, op.name) for recv, op in zip(recvs, ops, strict=True)]
    edges += [Edge(f"r{at % len(ops)}", f"f{len(ops) - 1}") for at in again]
    graph = Graph((*reversed(recvs), *ops), tuple(dict.fromkeys(edges)))
    costs = Costs({op.name: {"1": us} for op, (_, us) in zip(ops, layers, strict=True)})
    machine = Machine(Machine.of(cores=1).devices, (Link("file", "cpu0", 1e6),))
    receives = receives_of(graph, costs, machine)
    best_us = receives.makespan_us(exact_order(receives))
    assert receives.makespan_us(receives.by_first_use) <= best_us * (1 + 1e-12)
