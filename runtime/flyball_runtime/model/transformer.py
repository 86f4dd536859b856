"""Decoder-only transformers over a paged KV cache; ``ModelConfig`` says in what a family differs from the others.

Plain classes and not nn.Modules: nothing here is trained, hooked or moved, and a call costs no more than a call.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from flyball_kernels import DecoderHead, DecoderStack, DecodeSampling
from flyball_kernels import DecoderLayer as DecoderLayerOp
from flyball_kernels.backend import Backend
from flyball_kernels.paged_attention import paged_attention
from flyball_kernels.rope_kv_write import rope_kv_write
from flyball_runtime.core.checkpoint import ServedModel
from flyball_runtime.core.kv_layout import KVLayout, longest_reach
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.model.linear import AdaptedStep, Destinations, FusedLinear, Norm, Place, Projection, num_weights
from flyball_runtime.model.mlp import MLP, MixtureOfExperts
from flyball_runtime.model.rope import cos_sin_cache


class StepInputs(NamedTuple):
    """One ragged batch: the tokens of all sequences one after another, no padding. It begins like ``StepLayout``.

    Attributes:
        token_ids, positions: ``[num_tokens]`` int64.
        slot_mappings: for each group of layers ``[num_tokens]`` int64, where each token's K and V go:
            ``block_id * block_size + offset``.
        block_tables: for each group ``[num_seqs, max_blocks]`` int32; entries past a context's last block, and before a
            window's first, are not read.
        cu_query_lens: ``[num_seqs + 1]`` int32, cumulative numbers of this step's tokens, from 0.
        context_lens: ``[num_seqs]`` int32, tokens in the cache once this step's are written.
        logits_indices: ``[num_sampled]`` int64, increasing, tokens whose logits are wanted: the last ones of their sequence.
        cu_logits_lens: ``[num_seqs + 1]`` int32, cumulative numbers of these, from 0.
        max_query_len, max_logits_len, max_context_len: the largest of each.
        adapted: what LoRA adapters change for some of the tokens.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mappings: Sequence[Tensor]
    block_tables: Sequence[Tensor]
    cu_query_lens: Tensor
    context_lens: Tensor
    logits_indices: Tensor
    cu_logits_lens: Tensor
    max_query_len: int
    max_logits_len: int
    max_context_len: int
    adapted: AdaptedStep = ()


LAYERS_AT_ONCE, TOKENS_AT_ONCE = 16, 1024
"""Most layers of one op, and most of their number times the step's tokens: with few tokens, to call a layer takes a good part
of its time. No op takes much longer than a layer of a large step, since a step shows progress only between ops."""

KVTensors = list[tuple[Tensor, Tensor]]
"""Pairs of K and V cache, each ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous. ``KVLayout`` says whose.

In which order a block has its numbers depends on the backend; in 8 bits, their scales follow (see
``flyball_kernels.kv_cache``)."""


class LanguageModel(Protocol):
    """What runs a step: ``CausalLM``, or a model that transformers implements.

    Attributes:
        num_parameters: weights and biases; tied embeddings count once.
        layers_at_once: the most layers that run between two calls of ``after_layer``.
    """

    config: ServedModel
    backend: Backend
    layout: KVLayout
    num_parameters: int

    @property
    def layers_at_once(self) -> int: ...

    def forward(
        self,
        inputs: StepInputs,
        kv: KVTensors,
        after_layer: Callable[[], object] = ...,
        score: Callable[[Callable[[Tensor], Tensor]], object] | None = ...,
        pool: Callable[[Callable[[Tensor], Tensor]], object] | None = ...,
    ) -> Tensor:
        """Run one step; see ``CausalLM.forward``."""
        ...

    def timed_parts(
        self, inputs: StepInputs, kv: KVTensors, num_rows: int
    ) -> tuple[Callable[[], object], Callable[[], Tensor]]:
        """Return what start-up times: the layer that attends to the most tokens, and the head for ``num_rows`` tokens.

        The head returns logits.
        """
        ...


def _norm(config: ModelConfig, size: int, place: Place) -> Norm:
    return Norm(size, eps=config.rms_norm_eps, offset=config.norm_offset, place=place)


class Attention:
    """Causal self-attention with grouped KV heads; queries and keys optionally normed, per head or over all heads.

    Args:
        cos_sin: angles of this layer, see ``cos_sin_cache``.
    """

    def __init__(self, config: ModelConfig, layout: KVLayout, layer: int, cos_sin: Tensor, place: Place) -> None:
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.sizes = [q_size, kv_size, kv_size]
        names = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        qkv = {"qkv_proj": sum(self.sizes)} if config.fused_projections else names
        self.qkv_proj = FusedLinear(config.hidden_size, qkv, bias=config.qkv_bias, place=place)
        self.o_proj = FusedLinear(q_size, {"o_proj": config.hidden_size}, bias=config.output_bias, place=place)
        self.norms: tuple[Norm, Norm] | None = None
        if config.qk_norm is not None:
            q_width, k_width = (config.head_dim,) * 2 if config.qk_norm == "head" else (q_size, kv_size)
            self.norms = _norm(config, q_width, place), _norm(config, k_width, place)
        self.sinks = place.empty(config.num_attention_heads) if config.has_sinks else None
        self.config = config
        self.cos_sin = cos_sin
        self.backend = place.backend
        self.sliding_window = config.sliding_windows[layer]
        self.group, _ = layout.places[layer]

    @property
    def is_plain(self) -> bool:
        """Whether it has neither sinks nor norms over all heads."""
        return self.sinks is None and (self.norms is None or self.config.qk_norm == "head")

    def destinations(self, prefix: str) -> Destinations:
        yield from self.qkv_proj.destinations(prefix)
        yield from self.o_proj.destinations(prefix)
        if self.norms is not None:
            for name, norm in zip(("q_norm", "k_norm"), self.norms, strict=True):
                yield f"{prefix}{name}.weight", norm.weight
        if self.sinks is not None:
            yield f"{prefix}sinks", self.sinks

    def projections(self, prefix: str) -> Iterator[tuple[str, Projection]]:
        yield from self.qkv_proj.projections(prefix)
        yield from self.o_proj.projections(prefix)

    def pack(self) -> None:
        self.qkv_proj.pack()
        self.o_proj.pack()
        self.sinks = None if self.sinks is None else self.sinks.float()

    def write(self, x: Tensor, inputs: StepInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Write keys and values of the tokens, and return their queries ``[num_tokens, num_q_heads, head_dim]``."""
        qkv, per_head = self.qkv_proj(x, inputs.adapted), (None, None)
        if self.norms is not None and self.config.qk_norm == "width":
            qkv = self._norm_all_heads(qkv, *self.norms)
        elif self.norms is not None:
            per_head = self.norms[0].weight, self.norms[1].weight
        query: Tensor = rope_kv_write(
            qkv,
            inputs.positions,
            self.cos_sin,
            k_cache,
            v_cache,
            inputs.slot_mappings[self.group],
            backend=self.backend,
            q_norm=per_head[0],
            k_norm=per_head[1],
            eps=self.config.rms_norm_eps,
            norm_offset=self.config.norm_offset,
        )
        return query

    def attend(
        self, query: Tensor, inputs: StepInputs, k_cache: Tensor, v_cache: Tensor, *, only_logits: bool = False
    ) -> Tensor:
        """Return the output for these queries: of all tokens, or of those whose logits are wanted."""
        attended = paged_attention(
            query,
            k_cache,
            v_cache,
            inputs.block_tables[self.group],
            inputs.cu_logits_lens if only_logits else inputs.cu_query_lens,
            inputs.context_lens,
            scale=self.config.attention_scale,
            max_query_len=inputs.max_logits_len if only_logits else inputs.max_query_len,
            backend=self.backend,
            sliding_window=self.sliding_window,
            softcap=self.config.attention_softcap,
            sinks=self.sinks,
        )
        return self.o_proj(attended.flatten(1), inputs.adapted)

    def _norm_all_heads(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
        query, key, value = qkv.split(self.sizes, dim=1)
        return torch.cat((q_norm(query), k_norm(key), value), dim=1)


class Sublayer:
    """What is around attention and around the MLP: a norm before, a norm after, or both, and the residual addition.

    Args:
        before, after: names of the norms in the checkpoint; None where there is none.
    """

    def __init__(self, config: ModelConfig, before: str | None, after: str | None, place: Place) -> None:
        self._names = before, after
        self._before = None if before is None else _norm(config, config.hidden_size, place)
        self._after = None if after is None else _norm(config, config.hidden_size, place)
        self._scale = config.residual_scale

    def destinations(self, prefix: str) -> Destinations:
        for name, norm in zip(self._names, (self._before, self._after), strict=True):
            if norm is not None:
                yield f"{prefix}{name}.weight", norm.weight

    def enter(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what attention or the MLP gets, and the new residual."""
        if self._before is not None:
            return self._before.add(x, residual)
        total = x if residual is None else x + residual
        return total, total

    @property
    def only_norm(self) -> Norm | None:
        """The norm before, if there is nothing else but the addition."""
        return self._before if self._after is None and self._scale == 1.0 else None

    def leave(self, x: Tensor) -> Tensor:
        """Return what is to be added to the residual."""
        if self._after is not None:
            x = self._after(x)
        return x if self._scale == 1.0 else x * self._scale


class DecoderLayer:
    """Attention and MLP, each within its norms. ``residual`` is the running sum; ``x`` is what is still to be added.

    On a CPU most layers are an op (``op``), and ``CausalLM`` runs several as one. The others, and steps with LoRA adapters, run
    one op after another, which is what a call does; the results are the same to the last bit.
    """

    def __init__(self, config: ModelConfig, layout: KVLayout, layer: int, cos_sin: Tensor, place: Place) -> None:
        self.attention = Attention(config, layout, layer, cos_sin, place)
        self.mlp: MLP | MixtureOfExperts = MLP.dense(config, place)
        self.mlp_name = "mlp"
        if config.moe is not None and config.moe.layers[layer]:
            self.mlp, self.mlp_name = MixtureOfExperts(config, config.moe, place), config.moe.block_name
        around_attention, around_mlp = config.norm_names
        self.around_attention = Sublayer(config, *around_attention, place)
        self.around_mlp = Sublayer(config, *around_mlp, place)
        self.op: DecoderLayerOp | None = None

    def destinations(self, prefix: str) -> Destinations:
        yield from self.attention.destinations(f"{prefix}self_attn.")
        yield from self.mlp.destinations(f"{prefix}{self.mlp_name}.")
        yield from self.around_attention.destinations(prefix)
        yield from self.around_mlp.destinations(prefix)

    def projections(self, prefix: str) -> Iterator[tuple[str, Projection]]:
        yield from self.attention.projections(f"{prefix}self_attn.")
        yield from self.mlp.projections(f"{prefix}{self.mlp_name}.")

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()
        self.op = self._as_op()

    def _as_op(self) -> DecoderLayerOp | None:
        """Return the layer as one op if that has all its parts: C++ linear layers, no norm but those before."""
        attention, mlp = self.attention, self.mlp
        norms = self.around_attention.only_norm, self.around_mlp.only_norm
        if not attention.is_plain or norms[0] is None or norms[1] is None:
            return None
        qkv, output = attention.qkv_proj.packed, attention.o_proj.packed
        if qkv.kernel is None or output.kernel is None:
            return None
        gate_up = down = mixture = None
        if isinstance(mlp, MLP):
            gate_up, down = mlp.gate_up_proj.packed, mlp.down_proj.packed
            if gate_up.kernel is None or down.kernel is None:
                return None
        elif (mixture := mlp.as_part()) is None:
            return None
        q_norm, k_norm = (None, None) if attention.norms is None else (norm.weight for norm in attention.norms)
        config = attention.config
        return DecoderLayerOp(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            mixture=mixture,
            attention_norm=norms[0].weight,
            mlp_norm=norms[1].weight,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=config.rms_norm_eps,
            norm_offset=config.norm_offset,
            cos_sin_cache=attention.cos_sin,
            scale=config.attention_scale,
            sliding_window=attention.sliding_window,
            softcap=config.attention_softcap,
            activation=config.activation,
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: StepInputs,
        kv: tuple[Tensor, Tensor],
        *,
        only_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return ``x`` and ``residual`` of all tokens, or of those whose logits are wanted."""
        x, residual = self.around_attention.enter(x, residual)
        query = self.attention.write(x, inputs, *kv)
        if only_logits:
            query, residual = (rows.index_select(0, inputs.logits_indices) for rows in (query, residual))
            if not residual.shape[0]:
                return residual, residual
        x = self.around_attention.leave(self.attention.attend(query, inputs, *kv, only_logits=only_logits))
        x, residual = self.around_mlp.enter(x, residual)
        return self.around_mlp.leave(self.mlp(x, inputs.adapted)), residual


def _ends_of_runs(flags: list[bool]) -> list[int]:
    """Return for each flag where the run of set flags ends that it begins; for one that is not set, the next place."""
    ends: list[int] = []
    for index in reversed(range(len(flags))):
        goes_on = bool(ends) and flags[index] and flags[index + 1]
        ends.append(ends[-1] if goes_on else index + 1)
    return ends[::-1]


def _run_stack(
    stack: DecoderStack, x: Tensor, residual: Tensor | None, inputs: StepInputs, *, only_logits: bool = False
) -> tuple[Tensor, Tensor]:
    return stack(
        x,
        residual,
        inputs.positions,
        inputs.slot_mappings,
        inputs.block_tables,
        inputs.cu_query_lens,
        inputs.context_lens,
        inputs.logits_indices if only_logits else None,
        inputs.cu_logits_lens if only_logits else None,
    )


class CausalLM:
    """Embeddings, decoder layers and the head. Built empty: fill ``destinations``, then ``pack``, then call.

    Args:
        max_len: positions go from 0 to max_len - 1.
    Attributes:
        num_parameters: weights and biases; tied embeddings count once.
    """

    def __init__(self, config: ModelConfig, *, max_len: int, place: Place) -> None:
        self.config = config
        self.backend, self._place = place.backend, place
        self.embedding = place.empty(config.vocab_size, config.hidden_size)
        self.layout = KVLayout.of(config.sliding_windows, max_len)
        angles = {rope: cos_sin_cache(rope, config.head_dim, max_len, place.device) for rope in set(config.ropes)}
        self.layers = [
            DecoderLayer(config, self.layout, layer, angles[rope], place) for layer, rope in enumerate(config.ropes)
        ]
        self.norm = _norm(config, config.hidden_size, place)
        self.head_weight = self.embedding if config.tie_word_embeddings else place.empty(*self.embedding.shape)
        # Gemma rounds the factor to the dtype of the weights
        self.embedding_scale = float(torch.tensor(config.embedding_scale).to(place.dtype))
        self._head_op: DecoderHead | None = None
        self._ends: list[int] = []  # for each layer, where the layers end that are ops from there on, or the next one
        self._kv: KVTensors | None = None
        self._stacks: dict[tuple[int, int, bool, bool], DecoderStack] = {}
        packing = place.stored.packing
        self.num_parameters = sum(num_weights(name, tensor, packing) for name, tensor in self.destinations())

    def destinations(self) -> Destinations:
        """Every tensor that a checkpoint must hold; tied embeddings appear once."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            yield from layer.destinations(f"model.layers.{index}.")
        yield "model.norm.weight", self.norm.weight
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head_weight

    @property
    def layers_at_once(self) -> int:
        return min(LAYERS_AT_ONCE, max(1, sum(layer.op is not None for layer in self.layers)))

    def projections(self) -> dict[str, Projection]:
        """Return what adapters may change, by name in the checkpoint."""
        layers = (layer.projections(f"model.layers.{index}.") for index, layer in enumerate(self.layers))
        return {name: projection for one in layers for name, projection in one}

    def pack(self) -> None:
        """Hand the weights, now filled, to the kernels' layout, one layer after another.

        Where the kernels repack (CPU), a tied head becomes a second copy beside the embedding: the head is the largest
        matmul of a decode, and gains the most from its layout.
        """
        for layer in self.layers:
            layer.pack()
        self._ends = _ends_of_runs([layer.op is not None for layer in self.layers])
        self.lm_head = self._place.of_head().linear(self.head_weight)
        del self.head_weight
        if self.lm_head.kernel is not None:
            self._head_op = DecoderHead(
                norm=self.norm.weight,
                linear=self.lm_head,
                eps=self.config.rms_norm_eps,
                norm_offset=self.config.norm_offset,
            )

    def forward(
        self,
        inputs: StepInputs,
        kv: KVTensors,
        after_layer: Callable[[], object] = lambda: None,
        score: Callable[[Callable[[Tensor], Tensor]], object] | None = None,
        pool: Callable[[Callable[[Tensor], Tensor]], object] | None = None,
    ) -> Tensor:
        """Run one step, writing K and V of its tokens into ``kv``.

        Args:
            after_layer: called after each layer, or after those that ran as one: computed on a CPU, launched on a GPU.
            score: called with a function that returns the logits of any of the step's tokens, by their indices.
            pool: likewise, of their hidden states after the last norm.
        Returns:
            Logits ``[num_sampled, vocab_size]`` of the tokens at ``inputs.logits_indices``: in the model's dtype, or in fp32
            where it divides or bounds them.
        """
        x, residual, wanted = inputs.token_ids, None, inputs.logits_indices
        may_want_others, num_tokens, num_wanted = score is not None or pool is not None, x.shape[0], wanted.shape[0]
        # most tokens of a prefill are not sampled from: behind the last keys and values, nothing needs them
        only_logits = not may_want_others and not inputs.adapted and num_wanted < num_tokens
        num_left = num_wanted if only_logits else num_tokens  # behind the last layer
        can_have_head = not may_want_others and 0 < num_wanted == num_left
        for start, end in self._stretches(inputs):
            is_last = end == len(self.layers)
            head = self._head_op if can_have_head and is_last and end - start > 1 else None
            embeds = start == 0 and end > 1 and self.embedding_scale == 1.0
            if start == 0 and not embeds:
                x = self._embed(x)
            x, residual = self._run(start, end, x, residual, inputs, kv, embeds, head, only_logits and is_last)
            after_layer()
            if head is not None:
                return self._scaled(x)
        if score is not None:
            score(lambda wanted: self._logits(x[wanted], residual[wanted]).float())
        if pool is not None:
            pool(lambda wanted: self.norm.add(x[wanted], residual[wanted])[0])
        if num_wanted == 0:
            return x.new_empty((0, self.config.vocab_size))
        if num_wanted == num_left:  # these tokens and no others, in their order
            return self._logits(x, residual)
        return self._logits(x[wanted], residual[wanted])

    def timed_parts(
        self, inputs: StepInputs, kv: KVTensors, num_rows: int
    ) -> tuple[Callable[[], object], Callable[[], Tensor]]:
        """Return the layer that attends to the most tokens, and the head for ``num_rows`` tokens."""
        x = self.embedding[inputs.positions % self.config.vocab_size]
        index = longest_reach(self.config.sliding_windows)
        layer, caches = self.layers[index], kv[self.layout.places[index][1]]
        stack = None if layer.op is None else self._bound(index, index + 1, kv)
        run = partial(layer, x, None, inputs, caches) if stack is None else partial(_run_stack, stack, x, None, inputs)
        return run, lambda: self.lm_head(x[:num_rows])

    def _stretches(self, inputs: StepInputs) -> Iterator[tuple[int, int]]:
        """Cut the layers into those that run as one; each stretch ends before its second number."""
        at_once = max(1, min(LAYERS_AT_ONCE, TOKENS_AT_ONCE // max(1, inputs.token_ids.shape[0])))
        if inputs.adapted:
            at_once = 1
        start = 0
        while start < len(self._ends):
            end = min(start + at_once, self._ends[start])
            yield start, end
            start = end

    def _run(
        self,
        start: int,
        end: int,
        x: Tensor,
        residual: Tensor | None,
        inputs: StepInputs,
        kv: KVTensors,
        embeds: bool,
        head: DecoderHead | None,
        only_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run a stretch of layers; with ``embeds`` its ``x`` are token ids, and with a head its output is logits."""
        if self.layers[start].op is None or inputs.adapted:
            caches = kv[self.layout.places[start][1]]
            return self.layers[start](x, residual, inputs, caches, only_logits=only_logits)
        return _run_stack(self._stack(start, end, kv, embeds, head), x, residual, inputs, only_logits=only_logits)

    @property
    def can_decode(self) -> bool:
        """Whether the whole model can run as one op, whose logits tokens are chosen from as they are."""
        changes = self.embedding_scale, self.config.logits_divisor, self.config.logits_softcap
        return self._head_op is not None and self._ends[0] == len(self.layers) and changes == (1.0, 1.0, None)

    def decode(
        self,
        inputs: StepInputs,
        kv: KVTensors,
        num_steps: int,
        stops: Sequence[Collection[int]],
        sampling: DecodeSampling,
    ) -> Tensor:
        """Decode several tokens of each sequence, if the model ``can_decode``; see ``DecoderStack.decode``.

        Args:
            inputs: of the last of the steps, with the tokens of the first.
            stops: the tokens that end each sequence.
        Returns:
            ``[num_steps, num_seqs]`` int64.
        """
        return self._stack(0, len(self.layers), kv, embeds=True, head=self._head_op).decode(
            inputs.token_ids,
            inputs.block_tables,
            inputs.context_lens - (num_steps - 1),
            num_steps,
            torch.tensor([stop for each in stops for stop in each], dtype=torch.int64),
            torch.tensor([0, *accumulate(map(len, stops))], dtype=torch.int32),
            sampling,
        )

    def _stack(
        self, start: int, end: int, kv: KVTensors, embeds: bool = False, head: DecoderHead | None = None
    ) -> DecoderStack:
        """Return a stretch as one op, made once for the same caches."""
        if kv is not self._kv:  # in an engine they are the same in all steps
            self._kv, self._stacks = kv, {}
        key = start, end, embeds, head is not None
        if (stack := self._stacks.get(key)) is None:
            stack = self._stacks[key] = self._bound(start, end, kv, embeds, head)
        return stack

    def _bound(
        self, start: int, end: int, kv: KVTensors, embeds: bool = False, head: DecoderHead | None = None
    ) -> DecoderStack:
        """Return a stretch of layers, which are ops, as one op over their caches."""
        places = self.layout.places[start:end]
        return DecoderStack(
            [layer.op for layer in self.layers[start:end] if layer.op is not None],
            [kv[tensor] for _, tensor in places],
            [group for group, _ in places],
            embedding=self.embedding if embeds else None,
            head=head,
        )

    def _logits(self, x: Tensor, residual: Tensor) -> Tensor:
        hidden, _ = self.norm.add(x, residual)
        return self._scaled(self.lm_head(hidden))

    __call__ = forward

    def _embed(self, token_ids: Tensor) -> Tensor:
        x = F.embedding(token_ids, self.embedding)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.config.logits_divisor != 1.0:
            logits = logits.float() / self.config.logits_divisor
        if self.config.logits_softcap is not None:
            logits = torch.tanh(logits.float() / self.config.logits_softcap) * self.config.logits_softcap
        return logits
