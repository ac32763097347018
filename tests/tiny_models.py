"""Tiny random models of every supported family, and a driver that feeds one through a paged cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine.batch import Batch
from engine.model.attention import AttentionMetadata
from engine.model.attention_backends import Attention
from engine.model.config import ModelConfig
from engine.model.kv_cache import KVCache
from engine.model.transformer import Transformer

# Tiny matrices gain nothing from a second thread, and on a busy machine lose much by waiting for it.
torch.set_num_threads(1)

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **numbers) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}

TINY_CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: LlamaConfig(**SHAPE, head_dim=16),
    "llama-no-gqa": lambda: LlamaConfig(**SHAPE | {"num_key_value_heads": 6}),
    "llama-rope-linear": lambda: LlamaConfig(**SHAPE, **_rope("linear", factor=4.0)),
    "llama-rope-llama3": lambda: LlamaConfig(**SHAPE, **_rope("llama3", **LLAMA3)),
    "llama-rope-yarn": lambda: LlamaConfig(**SHAPE, **_rope("yarn", **YARN)),
    "qwen2-rope-yarn": lambda: Qwen2Config(
        **SHAPE, **_rope("yarn", **YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3)
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None, head_dim=12),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-tied": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}


def tiny_reference(name: str, seed: int = 0) -> PreTrainedModel:
    """The transformers model, float32, with every weight, norms and biases too, far from its default."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(TINY_CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            centre = 1.0 if "norm" in key else 0.0
            parameter.normal_(centre, 0.2)
    return model


def tiny_model(reference: PreTrainedModel, **options) -> Transformer:
    """Our model with the reference's weights."""
    config = ModelConfig.from_hf(reference.config)
    return Transformer(config, reference.state_dict().__getitem__, **options)


@dataclass
class Driver:
    """Feeds requests to a model in packed batches, its blocks dealt out in shuffled order."""

    model: Transformer
    num_blocks: int = 128
    block_size: int = 4
    seed: int = 0
    attention: type[Attention] = AttentionMetadata
    computed: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.model
        self.cache = KVCache(model.config, self.num_blocks, self.block_size, model.dtype, model.device)
        self.free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self.free)

    def batch(self, parts: dict[int, list[int]], wanted: dict[int, int] | None = None) -> Batch:
        """A batch of {request: its next tokens}; wanted: how many of its last rows to return (1 each)."""
        tokens, positions, slots, query_lens, context_lens, rows = [], [], [], [], [], []
        for request, part in parts.items():
            done, table = self.computed.get(request, 0), self.tables.setdefault(request, [])
            end = done + len(part)
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            tokens += part
            positions += range(done, end)
            for position in range(done, end):
                block, offset = divmod(position, self.block_size)
                slots.append(table[block] * self.block_size + offset)
            query_lens.append(len(part))
            context_lens.append(end)
            rows += range(len(tokens) - (wanted or {}).get(request, 1), len(tokens))
            self.computed[request] = end
        widest = max(len(self.tables[request]) for request in parts)
        tables = [self.tables[request] + [0] * (widest - len(self.tables[request])) for request in parts]
        device = self.model.device
        return Batch(
            token_ids=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            block_tables=torch.tensor(tables, device=device),
            query_lens=query_lens,
            context_lens=context_lens,
            lengths=torch.tensor([query_lens, context_lens], device=device),
            logits_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        )

    def step(self, parts: dict[int, list[int]], wanted: dict[int, int] | None = None) -> torch.Tensor:
        return self.model(self.batch(parts, wanted), self.cache, self.attention)


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_gguf(reference: PreTrainedModel, file: Path, rope_freqs: list[float] | None = None) -> None:
    """Write the model as an F16 GGUF file as llama.cpp's converter does, with a byte-level toy vocabulary."""
    config = reference.config
    family = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(file, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if "qwen" in family else "smollm")
    tokens = ["<|end|>", "<|start|>", "<|stop|>", "Ġa", "Ġ", *sorted({*ByteLevel.alphabet()} - {"Ġ"})]
    tokens = tokens[: config.vocab_size]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|stop|>{% endfor %}")
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        part = next(ours for theirs, ours in GGUF_NAMES.items() if stem.endswith(theirs))
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
        if heads and family == "llama":  # llama.cpp turns neighbouring rows; its converter reorders for that
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        layer = f"blk.{name.split('.')[2]}." if "layers" in name else ""
        stored = tensor.half() if tensor.ndim > 1 else tensor
        writer.add_tensor(f"{layer}{part}.{kind}", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
