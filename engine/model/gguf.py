"""GGUF files: read, dequantise once, and keep as an ordinary Hugging Face folder.

The folder (float32 safetensors, configuration, tokenizer, chat template) is what the loader then reads, so
there is one loading path, and `transformers` can load the very same weights for reference runs.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.model.config import ARCHITECTURES, ModelConfig
from engine.model.gguf_tokenizer import build_tokenizer
from engine.model.rope import rope_frequencies

CONVERTER_VERSION = 1  # part of the cache key: raise it when the written folder changes
MODEL_TYPES = ("llama", "qwen2", "qwen3")  # in GGUF and transformers alike; Mistral's files say "llama"
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(file: Path, progress: Callable[[str, float], None]) -> Path:
    """The Hugging Face folder of a GGUF file, written on first use; later calls find it.

    It lies under $GLASS_ENGINE_CACHE, or ~/.cache/glass-engine. The folder is written aside and renamed,
    so it is whole or absent, whichever process writes it and however many do.
    Raises ValueError naming what the file holds that is not supported.
    """
    root = Path(os.environ.get("GLASS_ENGINE_CACHE") or Path.home() / ".cache" / "glass-engine")
    state = file.stat()
    identity = f"{CONVERTER_VERSION} {file.resolve()} {state.st_size} {state.st_mtime_ns}"
    folder = root / f"{short_name(file)}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    try:
        _write_folder(file, unfinished, progress)
        os.chmod(unfinished, 0o755)  # mkdtemp's own is for one user only
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def short_name(file: Path) -> str:
    """The file's name without the mark of its quantisation: "SmolLM2-135M-Instruct" of "...Q4_1.gguf"."""
    return re.sub(r"[.-](I?Q\d\w*|B?F16|F32)$", "", file.stem, flags=re.IGNORECASE)


def _write_folder(file: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    metadata = Metadata(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    hf_config = _hf_config(metadata, tensors)
    config = ModelConfig.from_hf(hf_config)
    build_tokenizer(metadata.get).save_pretrained(folder)
    hf_config.save_pretrained(folder)
    stops = {hf_config.eos_token_id, metadata.get("tokenizer.ggml.eot_token_id")} - {None}
    generation = {"bos_token_id": hf_config.bos_token_id, "eos_token_id": sorted(stops)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))

    sources = {_hf_name(name): tensor for name, tensor in tensors.items() if name != "rope_freqs.weight"}
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in sources.items()}
    permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        source = sources[name]
        values = np.ascontiguousarray(dequantize(source.data, source.tensor_type), dtype=np.float32)
        values = values.reshape(shapes[name])
        heads = permuted.get(name.split(".")[-2])
        return _unpermute(values, heads) if heads and metadata.architecture == "llama" else values

    def report(fraction: float) -> None:
        progress("converting GGUF", fraction)

    write_safetensors(folder / "model.safetensors", shapes, read, report)


def write_safetensors(
    file: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    progress: Callable[[float], None],
) -> None:
    """Write float32 tensors one at a time, so that memory holds only one; `read(name)` supplies each.

    The format: the header's length as 8 bytes, the header as JSON, then the tensors end to end.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for done, name in enumerate(shapes, start=1):
            out.write(read(name).data)
            progress(done / len(shapes))


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of Llama's q and k rows: rotation pairs side by side -> halves apart."""
    rows = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        raise ValueError(f"unsupported tensor {name!r} in the GGUF file")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{TENSOR_NAMES[match[2]]}.{match[3]}"


class Metadata:
    """The file's key-value pairs; keys of the model itself are given without the architecture's prefix."""

    def __init__(self, reader: Any) -> None:
        self.fields = reader.fields
        self.architecture: str = self.get("general.architecture", "")
        if self.architecture not in MODEL_TYPES:
            raise ValueError(f"unsupported GGUF architecture {self.architecture!r}, not one of {MODEL_TYPES}")

    def get(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        value = default if field is None else field.contents()
        # float32 1e-5 is 0.00000999999974 as a float64; the shortest text that means it is the number meant.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def model(self, key: str, default: Any = None) -> Any:
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ValueError(f"the GGUF file lacks {self.architecture}.{key}")
        return value


def _hf_config(metadata: Metadata, tensors: dict[str, Any]) -> Any:
    """The `transformers` configuration that the metadata and the tensors present describe."""
    from transformers import AutoConfig

    heads, hidden = metadata.model("attention.head_count"), metadata.model("embedding_length")
    head_dim = metadata.model("attention.key_length", hidden // heads)
    if metadata.model("rope.dimension_count", head_dim) != head_dim or metadata.model("expert_count", 0):
        raise ValueError("unsupported GGUF model: partial rotation or a mixture of experts")
    settings = {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "hidden_size": hidden,
        "intermediate_size": metadata.model("feed_forward_length"),
        "num_hidden_layers": metadata.model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.model("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", [])),
        "rms_norm_eps": metadata.model("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.model("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": metadata.architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope_settings(metadata, tensors),
        "dtype": "float32",
    }
    config = AutoConfig.for_model(metadata.architecture, **settings)
    if "rope_freqs.weight" in tensors:
        _check_llama3(config, np.array(tensors["rope_freqs.weight"].data, dtype=np.float32))
    return config


def _rope_settings(metadata: Metadata, tensors: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.model("rope.freq_base", 1e4)}
    kind = metadata.model("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        # Llama 3.1's scaling comes as one divisor a channel; the slowest channels carry the factor.
        factor = float(np.max(tensors["rope_freqs.weight"].data))
        settings |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        settings["original_max_position_embeddings"] = 8192
    elif kind in ("linear", "yarn"):
        settings |= {"rope_type": kind, "factor": metadata.model("rope.scaling.factor")}
        if kind == "yarn":
            original = metadata.model("rope.scaling.original_context_length")
            settings["original_max_position_embeddings"] = original
    elif kind != "none":
        raise ValueError(f"unsupported rope scaling {kind!r} in the GGUF file")
    return settings


def _check_llama3(config: Any, divisors: np.ndarray) -> None:
    """The numbers assumed for Llama 3.1's scaling must give the file's divisors."""
    scaled = ModelConfig.from_hf(config)
    assumed = rope_frequencies(replace(scaled, rope_scaling=None))[0] / rope_frequencies(scaled)[0]
    if not torch.allclose(assumed, torch.from_numpy(divisors), rtol=1e-3):
        raise ValueError("unsupported rope_freqs.weight in the GGUF file: not Llama 3.1's scaling")
