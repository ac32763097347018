"""What the forward pass needs to know of a model, and the refusal of everything it cannot compute.

A model that loads but computes something else is worse than one that does not load, so whatever a
configuration asks for and `transformer.py` does not do is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# model_type in config.json -> the class name that its "architectures" entry must carry.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # also SmolLM2 and TinyLlama
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",  # also Qwen2.5
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family decoder. Lengths are in tokens.

    head_dim need not be hidden_size / num_heads. rope_scaling is None for plain RoPE, else the mapping
    with "rope_type" and that type's own numbers. qkv_bias, output_bias and mlp_bias say which linear
    layers add a bias; qk_norm says that queries and keys are RMS-normalised per head (Qwen3).
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf(cls, hf: Any, max_model_len: int | None = None) -> ModelConfig:
        """Read a `transformers` configuration object.

        max_model_len: the longest context that will be used, which decides whether a sliding window
            would ever bite; None means max_position_embeddings.
        Raises ValueError naming the architecture, activation, rope type or window that is not supported.
        """
        family = hf.model_type
        named = list(getattr(hf, "architectures", None) or [])
        if family not in ARCHITECTURES or (named and ARCHITECTURES[family] not in named):
            raise ValueError(
                f"unsupported architecture {', '.join(named) or family}; "
                f"supported are {', '.join(ARCHITECTURES.values())}"
            )
        if hf.hidden_act not in ("silu", "swish"):  # two names of one function
            raise ValueError(f"unsupported activation hidden_act={hf.hidden_act!r}; supported is 'silu'")
        if family != "llama":
            _refuse_sliding_window(hf, max_model_len or hf.max_position_embeddings)
        rope = _rope_parameters(hf)
        # Read only where the family has it: some configurations carry keys that their models ignore.
        biased = family in ("llama", "qwen3") and bool(getattr(hf, "attention_bias", False))
        num_heads = hf.num_attention_heads
        num_kv_heads = hf.num_key_value_heads or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads cannot evenly share {num_kv_heads} key/value heads")
        return cls(
            architecture=ARCHITECTURES[family],
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // num_heads,
            vocab_size=hf.vocab_size,
            rms_norm_eps=hf.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            max_position_embeddings=hf.max_position_embeddings,
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            qkv_bias=family == "qwen2" or biased,
            output_bias=biased,
            mlp_bias=family == "llama" and bool(getattr(hf, "mlp_bias", False)),
            qk_norm=family == "qwen3",
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this model holds, in Hugging Face's names."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            linear(f"{layer}.self_attn.q_proj", queries, hidden, self.qkv_bias)
            linear(f"{layer}.self_attn.k_proj", keys, hidden, self.qkv_bias)
            linear(f"{layer}.self_attn.v_proj", keys, hidden, self.qkv_bias)
            if self.qk_norm:
                shapes[f"{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
            linear(f"{layer}.self_attn.o_proj", hidden, queries, self.output_bias)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            linear(f"{layer}.mlp.gate_proj", inner, hidden, self.mlp_bias)
            linear(f"{layer}.mlp.up_proj", inner, hidden, self.mlp_bias)
            linear(f"{layer}.mlp.down_proj", hidden, inner, self.mlp_bias)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def _rope_parameters(hf: Any) -> dict[str, Any]:
    """The rope settings as one flat mapping with "rope_type" and "rope_theta", unknown types refused.

    transformers 5 keeps them in `rope_parameters`, older versions in `rope_scaling` and `rope_theta`.
    """
    rope = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    kind = rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"unsupported rope type {kind!r}; supported are {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"unsupported partial_rotary_factor={rope['partial_rotary_factor']}, not 1.0")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = getattr(hf, "rope_theta", None) or 10000.0
    if kind in ("llama3", "yarn"):
        # Beside the settings rather than among them, the original length goes first, as in transformers.
        original = getattr(hf, "original_max_position_embeddings", None)
        if original is not None:
            rope["original_max_position_embeddings"] = original
        rope.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
    return rope


def _refuse_sliding_window(hf: Any, longest: int) -> None:
    """A window at least as long as the longest context changes nothing; a shorter one is refused."""
    window = getattr(hf, "sliding_window", None)
    layer_types = getattr(hf, "layer_types", None)
    used = layer_types is None or "sliding_attention" in layer_types
    if window is not None and used and window < longest:
        raise ValueError(
            f"unsupported sliding_window={window}, shorter than the context of {longest} tokens; "
            f"max_model_len={window} keeps every request inside the window"
        )
