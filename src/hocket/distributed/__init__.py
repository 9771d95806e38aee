"""Training with parameter servers: transfers in a planned order, over `torch.distributed`.

Whatever waits for another rank raises `PeerError` if that one is gone or silent, and names it.
"""
