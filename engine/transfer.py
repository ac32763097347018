"""The way to the device and back: one copy up and one copy down a step, whatever there is to carry.

A copy costs microseconds to start and hardly more for a few kilobytes, and reading a value back makes the
host wait for everything before it. So the host first writes down all it knows about a step, then sends it
in one piece; and what it must know of the results it gets in one piece, with the step's only wait. On a CPU
both ways are free: the tensors are where they should be already.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def upload(device: torch.device, *records: Any) -> None:
    """Replace every tensor in these dataclass records by its like on the device, with one copy for all.

    The tensors must be int64 or float64: 8 bytes a number, so that all fit side by side in one buffer.
    """
    if device.type == "cpu":
        return
    fields = [(record, field.name) for record in records for field in dataclasses.fields(record)]
    fields = [field for field in fields if isinstance(getattr(*field), Tensor)]
    tensors = [getattr(*field) for field in fields]
    packed = to_device(pack(tensors, pinned=device.type == "cuda"), device)
    for field, tensor in zip(fields, unpack(packed, tensors), strict=True):
        setattr(*field, tensor)


def download(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """These tensors of the device on the host, by one copy and one wait.

    Their numbers must be such as float64 holds exactly: any float, integers below 2**53.
    """
    if device.type == "cpu":
        return list(tensors)
    numbers = to_host(torch.cat([tensor.flatten().double() for tensor in tensors]))
    parts = numbers.split([tensor.numel() for tensor in tensors])
    return [part.to(like.dtype).view(like.shape) for part, like in zip(parts, tensors, strict=True)]


def pack(tensors: list[Tensor], pinned: bool) -> Tensor:
    """The bits of int64 and float64 tensors, one after the other: int64 [numbers].

    pinned: in page-locked memory, which a GPU reads by itself while the host goes on. PyTorch keeps such
        memory for the next step, and gives it out again only when the copy is done.
    """
    packed = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=torch.int64, pin_memory=pinned)
    return torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors], out=packed)


def unpack(packed: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views into `packed` with the dtypes and shapes of what was packed."""
    parts = packed.split([tensor.numel() for tensor in like])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def to_device(packed: Tensor, device: torch.device) -> Tensor:
    """The step's copy up. The host does not wait for it."""
    return packed.to(device, non_blocking=True)


def to_host(numbers: Tensor) -> Tensor:
    """The step's copy down, and its one wait."""
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    torch.cuda.current_stream(numbers.device).synchronize()
    return host


def mark_time(device: torch.device) -> Callable[[], float]:
    """When the device gets to this place in its work, seconds on the monotonic clock.

    A GPU gets there later than the host, so the answer is a function, to be called once the host has waited
    for what comes after: a clock read on the host alone would count the GPU's work as the next stage's.
    """
    if device.type != "cuda":
        now = time.monotonic()
        return lambda: now
    here = torch.cuda.Event(enable_timing=True)
    here.record(torch.cuda.current_stream(device))

    def when() -> float:
        after = torch.cuda.Event(enable_timing=True)
        after.record(torch.cuda.current_stream(device))
        after.synchronize()
        return time.monotonic() - here.elapsed_time(after) / 1000  # it counts in milliseconds

    return when
