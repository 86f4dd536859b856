"""Decoder-only transformers of the Llama and Qwen families over a paged KV cache.

Plain classes and not nn.Modules: nothing here is trained, hooked or moved, and a call costs no more than a call.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flyball_kernels.backend import Backend
from flyball_kernels.linear import PackedLinear
from flyball_kernels.paged_attention import paged_attention
from flyball_kernels.rms_norm import add_rms_norm, rms_norm
from flyball_kernels.rope_kv_write import rope_kv_write
from flyball_kernels.swiglu import swiglu
from flyball_runtime.core.kv_layout import KVLayout
from flyball_runtime.core.model_config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One ragged batch: the tokens of all sequences one after another, no padding.

    Attributes:
        token_ids, positions: ``[num_tokens]`` int64.
        slot_mappings: for each group of layers ``[num_tokens]`` int64, where each token's K and V go:
            ``block_id * block_size + offset``.
        block_tables: for each group ``[num_seqs, max_blocks]`` int32; entries past a context's last block, and before a
            window's first, are not read.
        cu_query_lens: ``[num_seqs + 1]`` int32, cumulative numbers of this step's tokens, from 0.
        context_lens: ``[num_seqs]`` int32, tokens in the cache once this step's are written.
        max_query_len, max_context_len: the largest of each.
        logits_indices: ``[num_sampled]`` int64, tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    cu_query_lens: Tensor
    context_lens: Tensor
    max_query_len: int
    max_context_len: int
    logits_indices: Tensor


@dataclass(frozen=True)
class Place:
    """Where the tensors of a model are, and what computes with them."""

    dtype: torch.dtype
    device: torch.device
    backend: Backend

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class FusedLinear:
    """Several projections of the same input (q, k and v; gate and up) computed by one matmul.

    The checkpoint's tensors are rows of one buffer, so loading fills it in place. ``pack`` must be called once the
    weights are in; from then on the layer can be called.

    Args:
        parts: out_features of each projection by its name in the checkpoint, in the order of the output.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool, place: Place) -> None:
        out_features = sum(parts.values())
        self._parts = parts
        self._backend = place.backend
        self._weight: Tensor | None = place.empty(out_features, in_features)
        self._bias = place.empty(out_features) if bias else None
        self._packed: PackedLinear | None = None

    def destinations(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Names in the checkpoint, and the rows that each tensor is to be copied into."""
        for kind, buffer in (("weight", self._weight), ("bias", self._bias)):
            if buffer is not None:
                for name, rows in zip(self._parts, buffer.split(list(self._parts.values())), strict=True):
                    yield f"{prefix}{name}.{kind}", rows

    def pack(self) -> None:
        """Give the weights the layout that is fastest on their device; the buffer that was filled is let go."""
        assert self._weight is not None, "packed twice"
        self._packed = PackedLinear(self._weight, self._bias, backend=self._backend)
        self._weight = self._bias = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._packed is not None, "called before pack"
        return self._packed(x)


def cos_sin_cache(rope: RopeConfig, head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """``[max_len, head_dim]`` fp32: a position's cosines in the first half of its row, its sines in the second."""
    # on the CPU whatever the device: the angles then have the same bits everywhere
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """``[head_dim / 2]`` fp32, radians per position."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.rope_type:
        case "default":
            return inv_freq
        case "linear":
            return inv_freq / rope.factor
        case "llama3":
            return _stretch_long_wavelengths(inv_freq, rope)


def _stretch_long_wavelengths(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: ``kept`` is 1 for waves that repeat often in the original context, 0 for the longest."""
    repeats = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = (repeats - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * inv_freq + (1.0 - kept) * inv_freq / rope.factor


KVTensors = list[tuple[Tensor, Tensor]]
"""Pairs of K and V cache, each ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous. ``KVLayout`` says whose."""

Destinations = Iterator[tuple[str, Tensor]]
"""Tensor names of a checkpoint, and where their values go."""


class Attention:
    """Causal self-attention with grouped KV heads; queries and keys optionally normed per head (Qwen3)."""

    def __init__(self, config: ModelConfig, layout: KVLayout, layer: int, place: Place) -> None:
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, qkv, bias=config.qkv_bias, place=place)
        self.o_proj = FusedLinear(q_size, {"o_proj": config.hidden_size}, bias=config.output_bias, place=place)
        self.q_norm = place.empty(config.head_dim) if config.qk_norm else None
        self.k_norm = place.empty(config.head_dim) if config.qk_norm else None
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.backend = place.backend
        self.sliding_window = config.sliding_windows[layer]
        self.group, _ = layout.places[layer]

    def destinations(self, prefix: str) -> Destinations:
        yield from self.qkv_proj.destinations(prefix)
        yield from self.o_proj.destinations(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}q_norm.weight", self.q_norm
            yield f"{prefix}k_norm.weight", self.k_norm

    def pack(self) -> None:
        self.qkv_proj.pack()
        self.o_proj.pack()

    def __call__(self, x: Tensor, inputs: StepInputs, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        query = rope_kv_write(
            self.qkv_proj(x),
            inputs.positions,
            cos_sin,
            k_cache,
            v_cache,
            inputs.slot_mappings[self.group],
            backend=self.backend,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
        )
        attended = paged_attention(
            query,
            k_cache,
            v_cache,
            inputs.block_tables[self.group],
            inputs.cu_query_lens,
            inputs.context_lens,
            scale=self.scale,
            max_query_len=inputs.max_query_len,
            backend=self.backend,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(attended.flatten(1))


class MLP:
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, place: Place) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        gate_up = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = FusedLinear(hidden, gate_up, bias=config.mlp_bias, place=place)
        self.down_proj = FusedLinear(inner, {"down_proj": hidden}, bias=config.mlp_bias, place=place)
        self.backend = place.backend

    def destinations(self, prefix: str) -> Destinations:
        yield from self.gate_up_proj.destinations(prefix)
        yield from self.down_proj.destinations(prefix)

    def pack(self) -> None:
        self.gate_up_proj.pack()
        self.down_proj.pack()

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x), backend=self.backend))


class DecoderLayer:
    """Attention and MLP, each behind a norm. ``residual`` is the running sum; ``x`` is what is still to be added."""

    def __init__(self, config: ModelConfig, layout: KVLayout, layer: int, place: Place) -> None:
        self.attention = Attention(config, layout, layer, place)
        self.mlp = MLP(config, place)
        self.input_norm = place.empty(config.hidden_size)
        self.post_attention_norm = place.empty(config.hidden_size)
        self.eps = config.rms_norm_eps
        self.backend = place.backend

    def destinations(self, prefix: str) -> Destinations:
        yield from self.attention.destinations(f"{prefix}self_attn.")
        yield from self.mlp.destinations(f"{prefix}mlp.")
        yield f"{prefix}input_layernorm.weight", self.input_norm
        yield f"{prefix}post_attention_layernorm.weight", self.post_attention_norm

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: StepInputs,
        cos_sin: Tensor,
        kv: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = rms_norm(x, self.input_norm, self.eps, backend=self.backend), x
        else:
            x, residual = add_rms_norm(x, residual, self.input_norm, self.eps, backend=self.backend)
        x = self.attention(x, inputs, cos_sin, *kv)
        x, residual = add_rms_norm(x, residual, self.post_attention_norm, self.eps, backend=self.backend)
        return self.mlp(x), residual


class CausalLM:
    """Embeddings, decoder layers and the head. Built empty: fill ``destinations``, then ``pack``, then call.

    Args:
        max_len: positions go from 0 to max_len - 1.
    """

    def __init__(self, config: ModelConfig, *, max_len: int, place: Place) -> None:
        self.config = config
        self.backend = place.backend
        self.embedding = place.empty(config.vocab_size, config.hidden_size)
        self.layout = KVLayout.of(config.sliding_windows, max_len)
        self.layers = [DecoderLayer(config, self.layout, layer, place) for layer in range(config.num_hidden_layers)]
        self.norm = place.empty(config.hidden_size)
        self.head_weight = self.embedding if config.tie_word_embeddings else place.empty(*self.embedding.shape)
        self.cos_sin = cos_sin_cache(config.rope, config.head_dim, max_len, place.device)

    def destinations(self) -> Destinations:
        """Every tensor that a checkpoint must hold; tied embeddings appear once."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            yield from layer.destinations(f"model.layers.{index}.")
        yield "model.norm.weight", self.norm
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head_weight

    def pack(self) -> None:
        """Hand the weights, now filled, to the kernels' layout, one layer after another.

        Where the kernels repack (CPU), a tied head becomes a second copy beside the embedding: the head is the largest
        matmul of a decode, and gains the most from its layout.
        """
        for layer in self.layers:
            layer.pack()
        self.lm_head = PackedLinear(self.head_weight, backend=self.backend)
        del self.head_weight

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv: KVTensors, after_layer: Callable[[], object] = lambda: None) -> Tensor:
        """Run one step, writing K and V of its tokens into ``kv``.

        Args:
            after_layer: called after each layer: computed on a CPU, launched on a GPU.
        Returns:
            Logits ``[num_sampled, vocab_size]`` fp32 of the tokens at ``inputs.logits_indices``.
        """
        x, residual = F.embedding(inputs.token_ids, self.embedding), None
        for layer, (_, tensor) in zip(self.layers, self.layout.places, strict=True):
            x, residual = layer(x, residual, inputs, self.cos_sin, kv[tensor])
            after_layer()
        # most tokens of a prefill are not sampled from: drop them before the largest matmul of all
        wanted = inputs.logits_indices
        if not wanted.shape[0]:
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        hidden, _ = add_rms_norm(x[wanted], residual[wanted], self.norm, self.config.rms_norm_eps, backend=self.backend)
        return self.lm_head(hidden).float()

    __call__ = forward
