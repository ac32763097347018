"""The machine, and what its memory allows."""

from __future__ import annotations

import math
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.model.loader import weight_files
from engine.threads import core_ids


def hardware() -> dict[str, Any]:
    """The machine and the versions, as far as they bear on speed."""
    capabilities = {
        "AMX": "_is_amx_tile_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "avx512": "_is_avx512_supported",
        "avx2": "_is_avx2_supported",
    }
    facts = {
        "cpu": _cpu_name(),
        "cores": len(core_ids()),
        "threads": torch.get_num_threads(),
        "isa": [name for name, check in capabilities.items() if getattr(torch.cpu, check, bool)()],
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_bandwidth(device: str, num_bytes: int = 1 << 30) -> float:
    """GB/s at which plain sums read memory, the best of three: the speed limit of a decode step."""
    data = torch.ones(num_bytes // 4, device=device)
    best = math.inf
    for _ in range(3):
        start = time.monotonic()
        data.sum().item()  # .item() waits for a GPU
        best = min(best, time.monotonic() - start)
    return num_bytes / best / 1e9


def weight_bytes(model_path: Path, dtype: str) -> int:
    """Bytes that a step reads at least: every weight once, an embedding that is no head left out."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in weight_files(model_path):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 -- a file handle, not a dict
                sizes[key] = math.prod(tensors.get_slice(key).get_shape())
    if "lm_head.weight" in sizes:
        sizes.pop("model.embed_tokens.weight", None)
    return sum(sizes.values()) * getattr(torch, dtype).itemsize
