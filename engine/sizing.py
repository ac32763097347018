"""How much fits: the number of KV blocks, and the context limit that follows from it."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from engine.config import EngineConfig
from engine.model import LoadedModel
from engine.model.kv_cache import KVCache

CPU_MOST_BYTES = 1 << 30
CPU_FREE_FRACTION = 0.25
CGROUPS = Path("/sys/fs/cgroup")  # inside a container, its own
GPU_FREE_FRACTION = 0.8  # the rest is for activations and the allocator


def context_limit(loaded: LoadedModel, config: EngineConfig, num_blocks: int) -> int:
    """Most tokens of one request, prompt and output together.

    Raises ValueError if `max_model_len` goes beyond what the model was loaded for.
    """
    longest = config.max_model_len or loaded.max_model_len
    if longest > loaded.max_model_len:
        raise ValueError(
            f"max_model_len ({longest}) exceeds the model's limit of {loaded.max_model_len} tokens"
        )
    return min(longest, num_blocks * config.block_size)


def choose_num_blocks(loaded: LoadedModel, config: EngineConfig) -> int:
    """`num_blocks` as configured, or as many as fit. Raises ValueError if the memory does not hold them."""
    num_blocks = config.num_blocks or fit_num_blocks(loaded, config)
    size = num_blocks * KVCache.bytes_per_block(loaded.config, config.block_size, loaded.dtype)
    free = _free_bytes(loaded.device)
    if size > free:
        raise ValueError(
            f"num_blocks={num_blocks} of block_size={config.block_size} tokens take {_gib(size)} of memory, "
            f"and {_gib(free)} is free: lower num_blocks, block_size or kv_cache_memory_bytes"
        )
    return num_blocks


def fit_num_blocks(loaded: LoadedModel, config: EngineConfig) -> int:
    """Blocks that the memory budget holds, but no more than all slots together could fill.

    Raises ValueError if not even one block fits.
    """
    budget = config.kv_cache_memory_bytes or _default_budget(loaded.device)
    per_block = KVCache.bytes_per_block(loaded.config, config.block_size, loaded.dtype)
    if budget < per_block:
        raise ValueError(
            f"kv_cache_memory_bytes ({budget}) does not hold one KV block: {config.block_size} tokens "
            f"take {per_block} bytes"
        )
    longest = config.max_model_len or loaded.max_model_len
    return min(budget // per_block, config.max_num_seqs * -(-longest // config.block_size))


def _default_budget(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_free_bytes(device) * GPU_FREE_FRACTION)
    return min(int(_free_bytes(device) * CPU_FREE_FRACTION), CPU_MOST_BYTES)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([psutil.virtual_memory().available, *_container_free_bytes()])


def _container_free_bytes() -> list[int]:
    """What a container's memory limit leaves, if there is one; by version 2 of cgroups, or by version 1."""
    free = []
    for folder, limit, usage, prefix in (
        (CGROUPS, "memory.max", "memory.current", ""),
        (CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # Files that were read, such as the weights, count as used, but are dropped when room is needed.
            files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        except (OSError, ValueError):  # no such version here, or the limit is "max"
            continue
        free.append(max(0, most - max(0, used - files)))
    return free


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
