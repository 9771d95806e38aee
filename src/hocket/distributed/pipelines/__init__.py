"""Pipelines of `torch.distributed.pipelining`, whose stages are cut by measured time."""
