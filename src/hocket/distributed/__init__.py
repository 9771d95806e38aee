"""Training with parameter servers: transfers in a planned order, over `torch.distributed`."""
