"""Loops that keep numbers: meters, the best so far, averages, histories, schedulers of rates."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from loops.loop import Loop, classifier, loop, train, update


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {self.val:.4f} ({self.avg:.4f})"


@loop(planned=True)
def imagenet_meters(model, optimizer, batches) -> Loop:
    losses, top1, n = AverageMeter("Loss"), AverageMeter("Acc"), [0]

    def step(batch):
        images, target = batch
        output = model(images)
        loss = F.cross_entropy(output, target)
        accuracy = (output.argmax(1) == target).float().mean() * 100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy.item(), images.size(0))
        if n[0] % 20 == 0:
            print(f"[{n[0]}]", losses, top1)
        n[0] += 1

    return Loop(step, model, optimizer, batches, lambda: {"losses": vars(losses), "top1": vars(top1), "n": n})


@loop(planned=True)
def history_of_lists(model, optimizer, batches) -> Loop:
    history = defaultdict(list)

    def step(batch):
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        update(optimizer, loss)
        history["loss"].append(loss.item())
        history["right"].append(int((logits.argmax(1) == batch[1]).sum()))
        history[f"lr of group {0}"].append(optimizer.param_groups[0]["lr"])
        return {"loss": history["loss"][-1], "mean": sum(history["loss"]) / len(history["loss"])}

    return Loop(step, model, optimizer, batches, lambda: dict(history))


@loop(planned=True)
def checkpoints_that_load_by_default(folder, model, optimizer, batches) -> Loop:
    """One of them is saved while the step is recorded, with numbers that are followed then."""
    n, loaded = [0], []

    def step(batch):
        loss = train(model, optimizer, batch)
        n[0] += 1
        if n[0] % 7 == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": n[0]}
            torch.save(saved, folder / "last.pt")
        return loss

    def after(number, _):
        if n[0] % 7 == 0:
            found = torch.load(folder / "last.pt")
            loaded.append((found["step"], found["optimizer"]["param_groups"][0]["lr"]))

    return Loop(step, model, optimizer, batches, lambda: {"n": n, "loaded": loaded}, after)


@loop(planned=True)
def evaluated_every_20(model, optimizer, batches) -> Loop:
    scores, n = [], [0]

    def evaluate():
        model.eval()
        with torch.no_grad():
            score = sum((model(x).argmax(1) == y).float().mean().item() for x, y in batches[:3]) / 3
        model.train()
        return score

    def step(batch):
        loss = train(model, optimizer, batch)
        n[0] += 1
        if n[0] % 20 == 0:
            scores.append(evaluate())
            print(f"accuracy after {n[0]}: {scores[-1]:.2%}")
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"scores": scores, "n": n})


@loop(planned=True)
def early_result(model, optimizer, batches) -> Loop:
    n = [0]

    def step(batch):
        loss = train(model, optimizer, batch)
        n[0] += 1
        if n[0] % 5:
            return None
        print("reported", n[0])
        return {"loss": loss.item(), "step": n[0]}

    return Loop(step, model, optimizer, batches, lambda: {"n": n})


@loop(planned=True)
def perplexity(model, optimizer, batches) -> Loop:
    job = SimpleNamespace(state={"n": [0]})  # code of torch uses the name `state`, too

    def step(batch):
        loss = train(model, optimizer, batch)
        job.state["n"][0] += 1
        return {"loss": loss.item(), "perplexity": math.exp(min(loss.item(), 20)), "step": job.state["n"][0]}

    return Loop(step, model, optimizer, batches, lambda: job.state)


@loop(planned=True)
def confusion_matrix(model, optimizer, batches) -> Loop:
    matrix = np.zeros((4, 4), int)

    def step(batch):
        x, y = batch
        out = model(x)
        loss = update(optimizer, F.cross_entropy(out, y))
        np.add.at(matrix, (y.numpy(), out.argmax(1).numpy()), 1)
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"matrix": matrix})


class Window:
    """A median of the last values, as detection trainers keep it."""

    def __init__(self):
        self.values = deque(maxlen=4)

    @property
    def median(self):
        return sorted(self.values)[len(self.values) // 2]


@loop(planned=True)
def median_of_a_window(model, optimizer, batches) -> Loop:
    window = Window()

    def step(batch):
        loss = train(model, optimizer, batch)
        window.values.append(loss.item())
        return window.median

    return Loop(step, model, optimizer, batches, lambda: vars(window))


@loop(planned=True)
def numbers_by_float_before_the_update(model, optimizer, batches) -> Loop:
    meters, best = {"loss": 0.0, "hits": 0.0, "largest": 0.0}, [9.0]

    def note(loss, out, y):
        meters["loss"] += float(loss)
        meters["largest"] = max(meters["largest"], loss.item())
        meters["hits"] += float((out.argmax(1) == y).sum()) / float(len(y))
        if not math.isfinite(float(loss)):
            raise FloatingPointError("the loss is not finite")

    def step(batch):
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        optimizer.zero_grad()
        loss.backward()
        note(loss.detach(), out, batch[1])
        optimizer.step()
        best[0] = float(loss.detach())

    return Loop(step, model, optimizer, batches, lambda: {"meters": meters, "best": best})


@loop(planned=True)
def weights_looked_at_before_an_update_that_changes_nothing_yet(model, optimizer, batches) -> Loop:
    seen, calls = [], [0]

    def look(weight):
        seen.append(weight[0, 0].item())
        seen.append(weight.detach()[1].tolist())

    def step(batch):
        calls[0] += 1
        optimizer.param_groups[0]["lr"] = 0.0 if calls[0] < 25 else 0.05
        loss = classifier(model, batch)
        optimizer.zero_grad()
        loss.backward()
        look(model[0].weight)
        optimizer.step()

    return Loop(step, model, optimizer, batches, lambda: {"seen": seen})


@loop(planned=True)
def sums_that_begin_as_tensors(model, optimizer, batches) -> Loop:
    """Each step spells out a new tensor, adds to it in place, and hands it on."""
    log, totals = [], {"loss": torch.tensor(0.0), "norm": torch.tensor(0.0)}

    def step(batch):
        loss, norm = torch.tensor(0.0), torch.as_tensor([0.0, 1.0])
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss += F.cross_entropy(model(x), y) / 2
        for parameter in model.parameters():
            norm[0] += parameter.norm() ** 2
        optimizer.zero_grad()
        (loss + 0.01 * norm[0] * norm[1]).backward()
        optimizer.step()
        log.append([len(log), loss.detach().numpy(), norm.detach()])
        totals["loss"] += loss.item()
        totals["norm"] += norm[0].item()
        return loss.detach()

    def after(n, result):
        result.mul_(2)  # which is the loop's own

    return Loop(step, model, optimizer, batches, lambda: {"log": log, **totals}, after)


@loop(planned=True)
def largest_so_far(model, optimizer, batches) -> Loop:
    """The number stays as it is for the first steps, in which the loop is recorded."""
    largest, kept = {"logit": 2.0}, SimpleNamespace(logit=2.0)

    def step(batch):
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        largest["logit"] = max(largest["logit"], float(logits.detach().max()))
        kept.logit = max(kept.logit, float(logits.detach().numpy().max()))
        update(optimizer, loss)
        return loss.detach()

    return Loop(step, model, optimizer, batches, lambda: {"largest": largest, "kept": vars(kept)})
