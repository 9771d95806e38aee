"""Bytes become the values of a tensor: read directly into its memory if the format is the same, else copied.

::

    file   [ ...... chunk ...... ]                      same dtype, contiguous, CPU: read into the tensor's memory
    file   [ ...... chunk ...... ] -> staging -> copy_  another dtype, strides or device
"""

from __future__ import annotations

from typing import Any

import torch

from hocket.loading.weights import DTYPES, StoredTensor

# Size of a read: small enough that an urgent tensor does not wait long, and large enough for a system call or a
# request. It is a multiple of the element size of any dtype.
CHUNK_BYTES = 4 << 20

# The most adjacent tensors that are read together (the limit of one system call is 1,024).
MAX_TOGETHER = 256

# A copy of up to this many elements runs on the calling thread: above its grain size (32,768), torch hands parts of
# it to threads of OpenMP, and those of the reading thread would be others than those that compute.
SERIAL_ELEMENTS = 32_768

# Dtypes that numpy and memoryviews know.
_PLAIN = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool))


class Landing:
    r"""The memory that the chunks of one tensor are read into, in order: the tensor's own, or staging memory.

    Staging memory holds a chunk, which is then copied into the tensor, or the whole file tensor if strides differ.
    """

    def __init__(self, tensor: torch.Tensor, stored: StoredTensor) -> None:
        self._tensor = tensor
        self._dtype = DTYPES[stored.entry.dtype]
        self._is_flat = tensor.is_contiguous()
        self._own: memoryview | None = None
        self._staging: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        if tensor.dtype == self._dtype and tensor.device.type == "cpu" and self._is_flat and not tensor.is_neg():
            self._own = bytes_of(tensor)
        elif tensor.is_cuda:
            # The kernel that filled this memory before (a random start) may still be queued.
            self._stream = torch.cuda.Stream(tensor.device)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))

    def buffer(self, begin: int, end: int) -> memoryview:
        """Return the memory for bytes `begin` to `end` of the tensor."""
        if self._own is not None:
            return self._own[begin:end]
        if self._is_flat:
            self._staging = torch.empty((end - begin) // self._dtype.itemsize, dtype=self._dtype)
            return bytes_of(self._staging)
        if self._staging is None:
            self._staging = torch.empty(self._tensor.shape, dtype=self._dtype)
        return bytes_of(self._staging)[begin:end]

    def landed(self, begin: int, end: int) -> None:
        """Record that these bytes have been read."""
        if self._own is not None:
            return
        assert self._staging is not None
        if self._is_flat:
            first = begin // self._dtype.itemsize
            part = self._tensor.view(-1)[first : first + len(self._staging)]
            self._copy(part, self._staging)
        elif end == self._staging.nbytes:
            self._copy(self._tensor, self._staging)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                target.copy_(source)
            self._stream.synchronize()
            return
        if not target.ndim:
            target.copy_(source)
            return
        rows = max(1, SERIAL_ELEMENTS // max(1, target[0].numel()))
        for to, values in zip(target.split(rows), source.split(rows), strict=True):
            to.copy_(values)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, for writing."""
    array: Any
    if tensor.dtype in _PLAIN and tensor.numel():
        array = tensor.numpy()
        return memoryview(array).cast("B")  # a third of the time of the views below
    # A tensor of one element may have any stride.
    array = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(array)
