"""Division of a captured step, and steps that are refused."""

import pytest
import torch
from torch import nn

from distributed.training import batches, training
from hocket.arguments import spreading
from hocket.distributed.job import StepGuard, captured_for
from hocket.distributed.parts import assigned, check_exchangeable, server_part, worker_part
from hocket.distributed.state import begin_from_zeros
from hocket.errors import CaptureError, InputError
from support.refusals import fails, refused


def captured_of(of, step=None):
    return captured_for(step or of.step, of.model, of.optimizer, batches(0, 1)[0])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_each_parameter_is_a_shard_and_each_op_has_one_place(optimizer):
    of = training(optimizer)
    captured = captured_of(of)
    parameters = [name for name, _ in of.model.named_parameters()]
    found = assigned(captured, 2, num_workers=1)
    assert [each.name for each in found.pulls] == [f"pull:{name}" for name in parameters]
    assert {each.name for each in found.pushes} == {f"push:{name}.grad" for name in parameters}
    sizes = {f"pull:{name}": value.numel() * value.element_size() for name, value in of.model.named_parameters()}
    assert {each.name: each.size_bytes for each in found.pulls} == sizes
    everything = [*found.worker_ops, *(op for ops in found.server_ops for op in ops)]
    assert sorted(everything) == sorted(captured.graph.by_name)
    home = {each.name.removeprefix("pull:"): each.server for each in found.pulls}
    assert {each.name: each.server for each in found.pushes} == {f"push:{n}.grad": home[n] for n in home}
    loads = [sum(each.size_bytes for each in found.pulls if each.server == server) for server in (0, 1)]
    assert max(loads) <= sum(loads) * 0.99  # the largest parameter alone is that much
    parts = [worker_part(captured, found), *(server_part(captured, found, server) for server in (0, 1))]
    num_transfers = 2 * len(found.pulls) + 2 * len(found.pushes)
    assert sum(len(part.graph) for part in parts) == len(captured.graph) + num_transfers


def test_statistics_of_batch_norm_go_with_several_workers():
    found = assigned(captured_of(training()), 1, num_workers=2)
    names = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert {each.buffer for each in found.pushes if not each.averaged} == names
    assert names < {each.buffer for each in found.pulls}


def test_clipping_makes_one_shard():
    captured = captured_of(training(clip=True))
    refused("2 servers, and the step has 1 shards for them", assigned, captured, 2, num_workers=1)


def test_steps_that_cannot_be_divided():
    of = training()

    def accumulates(batch):
        loss = nn.functional.mse_loss(of.model(batch[0]), batch[1])
        loss.backward()
        of.optimizer.step()
        return loss

    with pytest.raises(InputError, match=r"adds to first\.weight\.grad, which it finds; call .* in the step before"):
        assigned(captured_of(of, accumulates), 1, num_workers=1)

    partly = training()
    partly.optimizer = torch.optim.SGD([partly.model.last.weight], lr=0.1)
    refused("no optimizer of the job has this parameter: freeze", assigned, captured_of(partly), 1, num_workers=1)

    def goes_on(batch):
        of.step(batch)
        return of.model(batch[0]).sum()

    refused("comes after what is done to gradients", assigned, captured_of(of, goes_on), 1, num_workers=1)

    def by_loss(batch):
        of.optimizer.zero_grad()
        loss = nn.functional.mse_loss(of.model(batch[0]), batch[1])
        loss.backward()
        for parameter in of.model.parameters():
            parameter.grad.mul_(loss.detach())
        of.optimizer.step()
        return loss

    with pytest.raises(InputError, match="of the update reads 'mse_loss:0', which is no gradient"):
        assigned(captured_of(of, by_loss), 1, num_workers=1)

    def only_forward(batch):
        return of.model(batch[0]).sum()

    refused("the step updates nothing", assigned, captured_of(of, only_forward), 1, num_workers=1)


def test_steps_that_are_more_than_their_graph():
    of, kept, mean = training(), [], {"loss": torch.zeros(())}
    before = {name: value.clone() for name, value in of.model.state_dict().items()}

    def appends(batch):
        kept.append(of.step(batch))

    fails(CaptureError, "the step appends to a list", StepGuard, appends, of.model, of.optimizer, batches(0, 1)[0])

    def binds(batch):
        mean["loss"] = mean["loss"] * 0.9 + of.step(batch).detach() * 0.1

    with pytest.raises(CaptureError, match=r"the step sets closure of binds: mean\['loss'\], and its parts would not"):
        StepGuard(spreading(binds), of.model, of.optimizer, batches(0, 1)[0])
    assert all(torch.equal(value, before[name]) for name, value in of.model.state_dict().items())


def test_steps_that_write_what_is_in_no_model_and_no_optimizer():
    of, total = training(), torch.zeros(3)

    def adds(batch):
        loss = of.step(batch)
        total.add_(loss.detach())
        return loss

    with pytest.raises(InputError, match=r"op 'add_\S*' writes a tensor of shape \(3,\) that belongs to no model"):
        check_exchangeable(captured_of(of, adds), 1)
    of = training("adam")
    of.step(batches(0, 1)[0])
    with pytest.raises(InputError, match="belongs to no model and no optimizer"):
        check_exchangeable(captured_for(of.step, of.model, [], batches(0, 1)[0]), 1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_state_begins_with_zeros_where_that_is_the_same(optimizer):
    of = training(optimizer)
    captured = captured_of(of)
    before = {name: value.clone() for name, value in of.model.state_dict().items()}
    assert not of.optimizer.state
    begin_from_zeros(captured)
    assert all(torch.equal(value, before[name]) for name, value in of.model.state_dict().items())
    state = [value for values in of.optimizer.state_dict()["state"].values() for value in values.values()]
    assert state
    assert not any(value.any() for value in state)


def test_state_that_does_not_begin_with_zeros_is_refused():
    captured = captured_of(training("dampened"))
    refused(r"first step is not like those that follow: it leaves another '.*'", begin_from_zeros, captured)
