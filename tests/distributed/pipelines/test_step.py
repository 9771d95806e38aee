"""Steps as pipelines, in this process: buffers that a forward binds anew, and ops that could draw and do not."""

import pytest
import torch
from torch import nn

import hocket
from hocket.distributed.pipelines.run import check_pipeline
from hocket.distributed.pipelines.step import PipelinedStep


class Averaged(nn.Module):
    """An LSTM without dropout, less an average of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 4, batch_first=True, dropout=0.0), nn.Linear(4, 2)
        self.register_buffer("average", torch.ones(4))

    def forward(self, value):
        self.average = 0.9 * self.average + 0.1 * value.mean((0, 1))
        return self.last(self.lstm(value - self.average)[0])


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning", "ignore:The tensor attributes")
def test_gradients_by_eager_leave_buffers_as_they_were():
    torch.manual_seed(0)
    model = Averaged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    job = hocket.Job(step, model, optimizer, [torch.randn(4, 3, 4)])
    first, second = (PipelinedStep(job, 2).eager_gradients() for _ in range(2))
    assert torch.equal(model.average, torch.ones(4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    check_pipeline(job, ranks=2, microbatches=2)


def test_noise_of_the_step_is_the_same_in_each_of_its_runs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        noise = torch.randn_like(batch)
        optimizer.zero_grad()
        (model(batch + noise) - noise).square().mean().backward()
        optimizer.step()

    state = {name: value.clone() for name, value in model.state_dict().items()}
    check_pipeline(hocket.Job(step, model, optimizer, [torch.randn(4, 4)]), ranks=2, microbatches=2)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
