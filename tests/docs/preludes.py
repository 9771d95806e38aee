"""The names that a block of docs takes as given, and code around it."""

from dataclasses import dataclass

STEP = """
import os, types
import torch, hocket
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
make_net = MyModel = lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
model = make_net()
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
example_batch = batch = (torch.randn(8, 16), torch.randint(0, 4, (8,)))
batches = my_batches = [batch] * 8
x, y = batch

def step(batch):
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss

def train(fast, *arguments):
    for _ in range(6):
        loss = fast(*(arguments or (batch,)))
    assert loss is not None
"""

CAPTURED = (
    STEP
    + """
captured = hocket.capture(step, model, optimizer, batch)
graph, costs = captured.graph, hocket.profile(captured, widths=[1])
machine = hocket.Machine.here()
"""
)

SAVED = (
    STEP
    + """
from safetensors.torch import save_file
own = f"model-{os.getpid()}.safetensors"  # ranks of a job write the same file, each whole
save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, own)
os.replace(own, "model.safetensors")
"""
)

JOB = STEP + 'rank, settings = int(os.environ["RANK"]), {"num_servers": 1, "timeout_s": 60}\n'


@dataclass(frozen=True)
class Around:
    """Code before and after a block, and the number of processes of the job that runs it."""

    before: str = ""
    after: str = ""
    ranks: int = 1


ITSELF = Around()
BLOCKS = {
    "compile 0": Around(STEP, "cross_entropy(model(x), y).backward(); assert hocket.dynamo.regions()"),
    "compile 1": Around(STEP, "assert fast.why == 'not decided yet'"),
    "compile 2": Around(
        STEP
        + """
import accelerate, lightning, transformers

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return (cross_entropy(logits, labels), logits) if labels is not None else logits

model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [{"x": x[i], "labels": y[i]} for i in range(8)]
arguments = transformers.TrainingArguments(
    "out", max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
)
""",
        "Module().net(x)",
    ),
    "compile 3": Around(
        STEP
        + """
model = nn.Module()
model.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
fully_shard = lambda module: module  # a job of one process has nothing to shard
""",
        "model.blocks[0](x).sum().backward()",
    ),
    "compile 4": Around(STEP, "cross_entropy(model(x), y).backward(); step()"),
    "distributed 0": Around(STEP, ranks=2),
    "distributed 1": Around(
        JOB
        + """
if rank == 1:
    hocket.distribute.server(step, model, optimizer, example_batch, **settings)
    raise SystemExit
fast = hocket.distribute.worker(step, model, optimizer, order="auto", **settings)
fast(batch)
my_inputs, trained, model, join = [x] * 3, model, make_net(), hocket.distribute.agent
hocket.distribute.agent = lambda model, _: join(model, f"127.0.0.1:{os.environ['MASTER_PORT']}")
""",
        "fast.synchronize(); assert torch.equal(y, trained(x)); fast.close()",
        ranks=2,
    ),
    "distributed 2": Around(
        JOB
        + """
if rank == 1:
    hocket.distribute.server(step, model, optimizer, batch, **settings)
    raise SystemExit
""",
        ranks=2,
    ),
    "eager 0": Around(
        STEP
        + """
import numpy as np
best, state, writer = {"loss": 1e9}, {"n": 0}, types.SimpleNamespace(add_scalar=lambda *words: None)
""",
        "train(hocket.schedule(step, model, optimizer)); assert state['n'] == 6",
    ),
    "eager 1": Around(
        STEP + "\nimport numpy as np\nrewards = np.arange(8.0, dtype=np.float32)",
        "train(hocket.schedule(step, model, optimizer), (x, y, rewards))",
    ),
    "eager 2": Around(
        STEP
        + """
losses, penalty = [], lambda model: model[0].weight.square().sum()
reconstruction = divergence = lambda model, batch: cross_entropy(model(batch[0]), batch[1])
""",
        "assert len(losses) == 8",
    ),
    "eager 3": Around(
        STEP + "\nsmooth = {'loss': 0.0}",
        "meter = AverageMeter(); train(hocket.schedule(step, model, optimizer), *batch); assert meter.count == 48",
    ),
    "eager 4": Around(
        STEP + "\nfrom torch.nn.utils import clip_grad_norm_\nstate = {'skipped': 0}",
        """
fast = hocket.schedule(step, model, optimizer, guard=False)
train(fast)
fast((x * float('nan'), y))
assert state["skipped"] == 1
""",
    ),
    "eager 5": Around(
        STEP + "\nrun, state, loss = types.SimpleNamespace(log=lambda *words, **more: None), {'step': 9}, x.sum()",
        "step(batch)",
    ),
    "forms 0": Around(STEP, "train(fast)"),
    "index 1": Around("import torch\nfrom torch.nn.functional import cross_entropy"),
    "files 1": Around("import hocket"),
    "loading 0": Around(SAVED + "batch = x", "assert output.shape == (8, 4)"),
    "loading 1": Around(SAVED + "batch, reader = x, 'model.safetensors'", "hocket.load(model, 'ordered.safetensors')"),
    "models 0": Around(
        CAPTURED + "run = lambda op, width, affinity: 10.0 + 100.0 / width + width", "assert costs.durations_us"
    ),
    "models 1": Around(CAPTURED + "cores = 2"),
    "models 2": Around(CAPTURED + "resnet50 = dcgan = inception = lstm = hocket.Graph(graph.ops[:5])"),
    "partition 0": Around(CAPTURED + "machine = hocket.Machine.of(cores=1)"),
    "partition 1": Around(
        JOB
        + """
import torch.distributed
device, loss, micro_batch = torch.device("cpu"), cross_entropy, x[:1]
torch.distributed.init_process_group("gloo")
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])
batch, targets = x, y
""",
        "assert all(parameter.grad is not None for parameter in stage.submod.parameters())",
        ranks=2,
    ),
    "partition 2": Around(JOB, ranks=2),
    "partition 3": Around(JOB, "fast.close()", ranks=2),
    "partition 4": Around(JOB + SAVED, "fast.close()", ranks=2),
    "partition 5": Around(
        JOB + "fast = hocket.distribute.stages(step, model, optimizer); fast(batch)", "fast.close()", ranks=2
    ),
    "partition 6": Around(
        STEP
        + """
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
step(batch)
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"train": {"model": model_state, "optimizer": optimizer_state}}
torch.distributed.checkpoint.save(state, checkpoint_id="checkpoint", no_dist=True)
"""
    ),
    "schedule 0": Around(
        STEP
        + """
class Base:
    def __init__(self):
        self.model, self.optimizer = model, optimizer
"""
    ),
    "simulator 1": Around("import hocket"),
    "transfers 0": Around(CAPTURED),
    "transfers 1": Around(
        CAPTURED
        + """
sent = []
def begin(op, tensor, epoch, done):
    sent.append(op)
    done(None)

channel = types.SimpleNamespace(runs_ahead=False, runs_behind=False, begin=begin)
""",
        "step(batch); step.close(); assert len(sent) == len(arrivals) + len(departures)",
    ),
    "tune 1": Around(
        """
import torch, hocket
from torch.nn.functional import cross_entropy
inputs = torch.randn(512, 16)
batches = list(zip(inputs.split(32), inputs[:, :4].argmax(1).split(32)))
layers = lambda *sizes: [torch.nn.Linear(*pair) for pair in zip(sizes, sizes[1:])]
"""
    ),
}
