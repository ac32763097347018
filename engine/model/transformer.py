"""The forward pass of a Llama-family model over one packed batch and the paged KV cache.

Read `Transformer.forward` first; it is the whole way from token ids to logits. Linear layers that read
the same input are one product (Q, K and V; gate and up), and each RMSNorm's weight is folded into the
layer behind it, so that norms only scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.batch import Batch
from engine.model.attention import AttentionMetadata
from engine.model.attention_backends import Attention
from engine.model.config import ModelConfig
from engine.model.kernels import Kernels, TorchKernels
from engine.model.kv_cache import KVCache
from engine.model.linear import LinearFactory, choose_linear
from engine.model.rope import rope_frequencies

GetTensor = Callable[[str], Tensor]


class Layer(nn.Module):
    """One decoder layer: attention and a gated MLP, each added to the residual stream."""

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        get: GetTensor,
        place: Callable[[Tensor], Tensor],
        linear: LinearFactory,
        kernels: type[Kernels],
    ) -> None:
        """get(name) returns a checkpoint's tensor; place(tensor) gives it the model's dtype and device."""
        super().__init__()
        self.index, self.config, self.kernels = index, config, kernels
        prefix = f"model.layers.{index}."

        def build(names: list[str], has_bias: bool, norm: str | None = None) -> nn.Module:
            """One linear layer out of several with the same input, whose norm's weight is folded in."""
            weight = torch.cat([get(f"{prefix}{name}.weight").float() for name in names])
            if norm is not None:
                weight *= get(f"{prefix}{norm}.weight").float()  # float32, before the cast rounds it
            bias = torch.cat([get(f"{prefix}{name}.bias").float() for name in names]) if has_bias else None
            return linear(place(weight), None if bias is None else place(bias))

        attention = [f"self_attn.{name}_proj" for name in "qkv"]
        self.qkv = build(attention, config.qkv_bias, "input_layernorm")
        self.output = build(["self_attn.o_proj"], config.output_bias)
        self.gate_up = build(["mlp.gate_proj", "mlp.up_proj"], config.mlp_bias, "post_attention_layernorm")
        self.down = build(["mlp.down_proj"], config.mlp_bias)
        self.norms: tuple[Tensor, Tensor] | None = None
        if config.qk_norm:
            q_norm, k_norm = (place(get(f"{prefix}self_attn.{name}_norm.weight")) for name in "qk")
            self.norms = q_norm, k_norm

    def forward(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rope: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: Attention,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is yet to be added to it, both [T, hidden_size] -> the same behind

        this layer, or only the given rows, int64 [S]. The sum waits for the norm, so that both are one pass.
        """
        kernels, eps = self.kernels, self.config.rms_norm_eps
        attended = self._attend(kernels.add_norm(hidden, delta, eps), rope, cache, metadata)
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        x = kernels.add_norm(hidden, self.output(attended), eps)
        return hidden, self.down(kernels.silu_mul(self.gate_up(x)))

    def _attend(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, metadata: Attention) -> Tensor:
        """x [T, hidden_size] -> what all heads saw, [T, heads * head_dim]; stores K and V on the way."""
        config = self.config
        qkv = self.qkv(x).view(len(x), -1, config.head_dim)
        self.kernels.rotate_and_store(
            qkv, rope, self.norms, config.rms_norm_eps, cache, self.index, metadata.slot_mapping
        )
        return metadata.attend(qkv[:, : config.num_heads], cache, self.index).flatten(1)


class Transformer(nn.Module):
    """A Llama-family model (Touvron et al. 2023, and its kin) for inference.

    Weights are taken tensor by tensor, so a checkpoint is never held twice.
    """

    def __init__(
        self,
        config: ModelConfig,
        get: GetTensor,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        linear: LinearFactory | None = None,
        kernels: type[Kernels] = TorchKernels,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        """get(name): a checkpoint's tensor, for every name in `config.tensor_shapes()`.

        linear: the backend of the linear layers; None chooses the fastest of PyTorch's that works here.
        kernels: the backend of what lies between them.
        progress: called with the fraction built, 0 to 1.
        """
        super().__init__()
        device = torch.device(device)
        self.config, self.dtype, self.device, self.kernels = config, dtype, device, kernels
        linear = linear or choose_linear(dtype, device)

        def place(tensor: Tensor) -> Tensor:
            # A copy always: the source may be a view of a mapped file.
            return tensor.to(device, dtype, copy=True)

        self.embedding = nn.Parameter(place(get("model.embed_tokens.weight")), requires_grad=False)
        self.layers = nn.ModuleList()
        for index in range(config.num_layers):
            self.layers.append(Layer(index, config, get, place, linear, kernels))
            progress((index + 1) / (config.num_layers + 1))
        # The last norm stays out of the head, which may share its weight with the embedding.
        self.norm = nn.Parameter(place(get("model.norm.weight")), requires_grad=False)
        tied = config.tie_word_embeddings
        self.head = linear(self.embedding.data if tied else place(get("lm_head.weight")), None)
        frequencies, self.rope_factor = rope_frequencies(config)
        self.frequencies = nn.Parameter(frequencies.to(device), requires_grad=False)
        progress(1.0)
        self.eval()

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, attention: type[Attention] = AttentionMetadata) -> Tensor:
        """Run one step: store the K and V of its T tokens, return logits float32 [S, vocab_size].

        S is len(batch.logits_rows) and may be 0, for steps that only fill the cache.
        """
        metadata = attention.build(batch, self.config, cache.block_size, self.dtype)
        rope = self.kernels.rope(batch.positions, self.frequencies, self.rope_factor, self.dtype)
        cache.begin_step(len(batch.token_ids))
        hidden = F.embedding(batch.token_ids, self.embedding)
        delta: Tensor | None = None
        last = self.config.num_layers - 1
        for index, layer in enumerate(self.layers):
            rows = batch.logits_rows if index == last else None
            hidden, delta = layer(hidden, delta, rope, cache, metadata, rows)
        assert delta is not None
        hidden = F.rms_norm(hidden.add_(delta), hidden.shape[-1:], self.norm, self.config.rms_norm_eps)
        return self.head.in_float32(hidden)
