"""Steps that stay eager for what they do with Python's state and the world outside, one for each finding.

In each the line marked "here" is at fault. One of the same name with "_cured" does what the reason says.
"""

import datetime
import random
import time

import numpy as np
import torch

from tracing.refused_steps import usual

exchanges_cured = usual


def hands_on(p, batch):
    p.table["n"] += 1
    span = datetime.timedelta(seconds=p.table["n"])  # here
    return p.train(p.loss(batch) * (span.days + 1))


def hands_on_cured(p, batch):
    p.table["n"] += 1
    return p.train(p.loss(batch) * (p.table["n"] // 86400 + 1))


def draws(p, batch):
    order = [0, 1, 2, 3]
    random.shuffle(order)  # here
    return p.train(p.loss(batch[order]))


def draws_cured(p, batch):
    return p.train(p.loss(batch * torch.rand(())))


def advances(p, batch):
    return p.train(p.loss(batch + next(p.numbers)))  # here


def keeps_a_graph(p, batch):
    loss = p.loss(batch)
    p.table["kept"] = p.model[2].bias.sum()  # here
    return p.train(loss)


def keeps_a_graph_cured(p, batch):
    loss = p.loss(batch)
    p.table["kept"] = p.model[2].bias.detach().sum()
    return p.train(loss)


def counts(p, batch):
    p.table["deque"][0] += 1  # here
    return p.train(p.loss(batch))


def grows(p, batch):
    p.table["names"][f"n{len(p.table['names'])}"] = 1  # here
    return p.train(p.loss(batch))


def writes_an_array(p, batch):
    p.table["array"][1] += 1  # here
    return p.train(p.loss(batch))


def writes_an_array_cured(p, batch):
    p.table["tensor"][1] += 1
    return p.train(p.loss(batch))


def exchanges(p, batch):
    p.table["object"] = object()  # here
    return p.train(p.loss(batch))


def marks_a_tensor(p, batch):
    p.model[0].weight.register_hook(torch.neg)  # here
    return p.train(p.loss(batch))


def marks_a_tensor_cured(p, batch):
    handle = p.model[0].weight.register_hook(torch.neg)
    loss = p.train(p.loss(batch))
    handle.remove()
    return loss


def returns_replaced(p, batch):
    before = p.table["stats"]
    loss = p.train(p.loss(batch))
    p.table["stats"] = {"loss": loss.item()}
    return before  # here


def returns_replaced_cured(p, batch):
    before = dict(p.table["stats"])
    loss = p.train(p.loss(batch))
    p.table["stats"] = {"loss": loss.item()}
    return before


def refills(p, batch):
    p.table["n"] += 1
    p.table["stats"] = {"loss": 0.5, "parity": "odd" if p.table["n"] % 2 else "even"}  # here
    return p.train(p.loss(batch))


def refills_cured(p, batch):
    p.table["n"] += 1
    p.table["stats"] = {"loss": 0.5, "parity": p.table["n"] % 2}
    return p.train(p.loss(batch))


# Steps that ask for what only Python knows.


def asks_the_clock(p, batch):
    return p.train(p.loss(batch) * (time.time() > 0))  # here


def asks_the_system(p, batch):
    from os.path import exists

    return p.train(p.loss(batch) * (1 + exists("/nowhere")))  # here


def calls_functions(p, batch):
    scaled = torch.cond(batch.sum() > -9999, lambda x: torch.dropout(x, 0.5, True), torch.cos, (batch,))  # here
    return p.train(p.loss(scaled))


def calls_functions_cured(p, batch):
    return p.train(p.loss(torch.cond(batch.sum() > -9999, torch.sin, torch.cos, (torch.dropout(batch, 0.5, True),))))


def draws_by_numpy(p, batch):
    order = np.arange(4)
    np.random.shuffle(order)  # noqa: NPY002  # here
    return p.train(p.loss(batch[torch.from_numpy(order)]))


OWN = np.random.default_rng(0)


def draws_by_its_own_generator(p, batch):
    order = np.arange(4)
    OWN.shuffle(order)  # here
    return p.train(p.loss(batch[torch.from_numpy(order)]))


def sets_a_value(p, batch):
    loss = p.train(p.loss(batch))
    p.table["loss"] = loss.item() if p.table.get("loss") is None else None  # here
    return loss


def sets_a_value_cured(p, batch):
    return p.train(p.loss(batch)).item()
