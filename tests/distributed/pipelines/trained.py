"""Models that are cut into stages, and a rank that runs some of them with one of torch's schedules."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, pipeline
from torch.nn import functional as F

import hocket
from benchmarks.partition.paced import Logits, UNet
from hocket.distributed.pipelines.split import schedule_class

MICROBATCHES = 4


class Tied(nn.Module):
    """One weight at both ends, a mask of whole numbers read by every layer, a transposed view between layers."""

    def __init__(self, width: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, tokens):
        mask = tokens > 3
        with torch.no_grad():
            angles = torch.cos(tokens.to(self.scale.dtype)[..., None] * self.scale)
        value = self.embedding(tokens)
        for layer in self.layers:
            value = torch.where(mask[..., None], F.gelu(layer(value.transpose(0, 1)).transpose(0, 1)), value) * angles
        return F.linear(value, self.embedding.weight)


class Heads(nn.Module):
    """A weight of many names, of which the first stage has one, handed on outside of any module."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(16, width), nn.Linear(width, width)
        self.heads = nn.ModuleList(nn.Linear(width, 16) for _ in range(6))
        for head in self.heads:
            head.weight = self.embedding.weight

    def forward(self, tokens):
        value = self.middle(self.embedding(tokens)).tanh().sin()
        return sum(head(value * number) for number, head in enumerate(self.heads, 1))


class Twice(nn.Module):
    """Layers that are used twice, and a table that is looked up where its numbers have no gradients."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.table, self.last = nn.Embedding(8, width), nn.Linear(width, width)

    def forward(self, value):
        places = (value > 0).sum(1) % 4
        for number in range(6):
            value = self.layers[number % 3](value).tanh() + self.table(places + number % 4)
        return self.last(value)


def model_and_batch(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model in float64 and a batch for all micro-batches, the same in every process."""
    torch.manual_seed(0)
    rows = 2 * MICROBATCHES
    if name == "tied":
        return Tied().double(), torch.randint(0, 16, (rows, 6))
    if name == "heads":
        return Heads().double(), torch.randint(0, 16, (rows, 6))
    if name == "twice":
        return Twice().double(), torch.randn(rows, 8, dtype=torch.float64)
    if name == "unet":
        return UNet().double(), torch.randn(rows, 3, 16, 16, dtype=torch.float64)
    if name == "resnet18":
        from hocket.zoo import load

        return load(name, image_size=64).model.double().train(), torch.randn(rows, 3, 64, 64, dtype=torch.float64)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2":
        config = GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=16,
            n_layer=4,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        config.bos_token_id = config.eos_token_id = 0
        return Logits(GPT2LMHeadModel(config)).double(), torch.randint(0, 64, (rows, 8))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes, **heads))
    return Logits(llama).double(), torch.randint(0, 64, (rows, 8))


def gradients_by_stages(pipe, batch):
    """Stages one after the other, as ranks run them: what a stage gets requires gradients, and gives them back."""
    values, made = (batch,), []
    for number in range(pipe.num_stages):
        assert all(v.is_contiguous() for v in values), "a wire takes no others"
        given = tuple(v.detach().requires_grad_(v.is_floating_point()) for v in values)
        values = pipe.get_stage_module(number)(*given)
        values = values if isinstance(values, tuple) else (values,)
        made.append((given, values))
    output = values[0]
    torch.autograd.backward([output.square().mean()])
    for (given, _), (_, earlier) in zip(reversed(made[1:]), reversed(made[:-1]), strict=True):
        pairs = [(value, got.grad) for value, got in zip(earlier, given, strict=True) if value.requires_grad]
        pairs = [(value, torch.zeros_like(value) if grad is None else grad) for value, grad in pairs]
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
    found = {}
    for number in range(pipe.num_stages):
        for name, parameter in pipe.get_stage_module(number).named_parameters():
            assert name not in found, f"{name} has two homes"
            found[name] = parameter.grad
    return output, found


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def train_stage(rank: int, say, name: str, stages: int, schedule: str = "1f1b", ranks: int = 0) -> dict[str, float]:
    """One step of a schedule; for each parameter of the rank how far its gradient is from eager's, relatively."""
    ranks = ranks or stages
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    model, batch = model_and_batch(name)
    policy = hocket.split_policy(stages, microbatches=MICROBATCHES, schedule=schedule, ranks=ranks)
    pipe = pipeline(model, (batch[:2],), split_policy=policy)
    mine = [number for number, home in enumerate(policy.order.rank_of) if home == rank]
    device = torch.device("cpu")
    if schedule in ("zbvzerobubble", "dualpipev"):
        # A traced stage greets both neighbours over the wire, also where it is its own; gloo has none to itself.
        built = [PipelineStage(pipe.get_stage_module(number), number, stages, device) for number in mine]
    else:
        built = [pipe.build_stage(number, device) for number in mine]
    eager, _ = model_and_batch(name)
    target = torch.zeros_like(model_and_batch(name)[0](batch)).detach()
    made = schedule_class(schedule)(built[0] if stages == ranks else built, MICROBATCHES, loss_fn=loss_of)
    made.step(*([batch] if 0 in mine else []), **({"target": target} if stages - 1 in mine else {}))
    for part, wanted in zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        (loss_of(eager(part), wanted) / MICROBATCHES).backward()
    expected = dict(eager.named_parameters(remove_duplicate=False))
    found = {}
    for stage in built:
        for parameter, value in stage.submod.named_parameters():
            gradient = expected[parameter].grad
            scale = float(gradient.abs().max())
            assert scale > 0, parameter
            assert parameter not in found, parameter
            found[parameter] = float((value.grad - gradient).abs().max()) / scale
    dist.barrier()
    dist.destroy_process_group()
    return found
