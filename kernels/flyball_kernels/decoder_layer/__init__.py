"""Decoder layers as one op. With few tokens, a CPU spends more time between small ops than in them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flyball_kernels.checks import check_contiguous, check_dtype, check_shape
from flyball_kernels.linear import Linear
from flyball_kernels.swiglu import Activation


class SharedExpert(NamedTuple):
    """An expert that all tokens use: its linear layers, and the one that gives its share in a token's sum, before a sigmoid."""

    gate_up: Linear
    down: Linear
    gate: Linear


class Mixture:
    """A mixture of experts in the place of a layer's gated MLP: see ``reference.decoder_layer``, whose bits it has.

    Args:
        router: gives a logit for each expert.
        gate_up, down: of each expert.
        experts_per_token: those of the largest logits.
        normalizes: whether their weights are scaled to add up to 1.
        activation: see ``swiglu``.
        shared: None if there is no such expert.
    Raises:
        ValueError: the weights do not fit each other, or a linear layer has no C++ weights.
    """

    def __init__(
        self,
        *,
        router: Linear,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        experts_per_token: int,
        normalizes: bool,
        activation: Activation = "silu",
        shared: SharedExpert | None = None,
    ) -> None:
        for name, linears in (("router", [router]), ("gate_up", gate_up), ("down", down), ("shared", shared or ())):
            for linear in linears:
                _check_is_packed(name, linear)
        self.hidden_size = router.in_features
        self.kernel: Any = torch.classes.flyball.Mixture(
            router.kernel,
            [linear.kernel for linear in gate_up],
            [linear.kernel for linear in down],
            experts_per_token,
            normalizes,
            activation == "gelu_tanh",
            *((None,) * 3 if shared is None else (linear.kernel for linear in shared)),
        )


class DecoderLayer:
    """Attention and a gated MLP, a norm before each, and the residual additions; see ``DecoderStack``.

    Args:
        qkv, output: linear layers with C++ weights, see ``Linear.kernel``.
        gate_up, down: likewise, of the MLP; None where there is a mixture.
        mixture: of experts, in the MLP's place.
        attention_norm, mlp_norm: ``[hidden]`` RMSNorm weights.
        q_norm, k_norm, eps, norm_offset, cos_sin_cache: see ``rope_kv_write``; eps and norm_offset are of all norms.
        scale, sliding_window, softcap: see ``paged_attention``.
        activation: see ``swiglu``.
    Raises:
        ValueError: the weights do not fit each other, or a linear layer has no C++ weights.
    """

    def __init__(
        self,
        *,
        qkv: Linear,
        output: Linear,
        gate_up: Linear | None = None,
        down: Linear | None = None,
        mixture: Mixture | None = None,
        attention_norm: Tensor,
        mlp_norm: Tensor,
        cos_sin_cache: Tensor,
        eps: float,
        scale: float,
        norm_offset: float = 0.0,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        activation: Activation = "silu",
    ) -> None:
        _check_sizes(qkv, output, gate_up, down, mixture)
        for name, norm in (("attention_norm", attention_norm), ("mlp_norm", mlp_norm)):
            check_shape(name, norm, qkv.in_features)
        for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
            if weight is not None:
                check_shape(name, weight, None)
        for name, tensor in (
            ("attention_norm", attention_norm),
            ("mlp_norm", mlp_norm),
            ("q_norm", q_norm),
            ("k_norm", k_norm),
            ("cos_sin_cache", cos_sin_cache),
        ):
            if tensor is not None:
                check_contiguous(name, tensor)
                check_dtype(name, tensor, tensor.dtype if name == "cos_sin_cache" else attention_norm.dtype)
        self.kernel: Any = torch.classes.flyball.DecoderLayer(
            *(None if part is None else part.kernel for part in (qkv, output, gate_up, down, mixture)),
            attention_norm,
            mlp_norm,
            q_norm,
            k_norm,
            eps,
            norm_offset,
            cos_sin_cache,
            scale,
            sliding_window,
            softcap,
            activation == "gelu_tanh",
        )


class DecoderHead:
    """What makes logits of the last layer's output: a norm and a linear layer; see ``DecoderStack``.

    Args:
        norm: ``[hidden]`` RMSNorm weights.
        linear: with C++ weights, see ``Linear.kernel``.
        eps, norm_offset: see ``rms_norm``.
    Raises:
        ValueError: the weights do not fit each other, or the linear layer has no C++ weights.
    """

    def __init__(self, *, norm: Tensor, linear: Linear, eps: float, norm_offset: float = 0.0) -> None:
        check_shape("norm", norm, linear.in_features)
        check_contiguous("norm", norm)
        _check_is_packed("linear", linear)
        self.kernel: Any = torch.classes.flyball.DecoderHead(norm, eps, norm_offset, linear.kernel)


class DecodeSampling(NamedTuple):
    """How ``DecoderStack.decode`` chooses tokens: ``[num_seqs]`` tensors, see ``sample``."""

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    seeds: Tensor | None = None


class DecoderStack:
    """Layers that follow each other, as one op: ``reference.decoder_layer`` of each; with what comes before and behind.

    They run the C++ kernels of the ops that they contain, so they give their bits. Threads are started once for all. What stays
    from step to step is handed over and checked here: to do that in each step takes longer than some of the ops.

    Args:
        layers: with attention of equal sizes, and of one dtype.
        caches: K and V cache of each layer, see ``rope_kv_write``; contiguous.
        groups: which of the slot mappings and block tables of a call are a layer's.
        embedding: ``[vocab, hidden]``; the first layer's input is then made of token ids.
        head: makes logits of what the last layer gives.
    Raises:
        ValueError: layers, caches, embedding and head do not fit each other.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        caches: Sequence[tuple[Tensor, Tensor]],
        groups: Sequence[int],
        *,
        embedding: Tensor | None = None,
        head: DecoderHead | None = None,
    ) -> None:
        kernel: Any = torch.classes.flyball.DecoderStack(
            [layer.kernel for layer in layers],
            [k_cache for k_cache, _ in caches],
            [v_cache for _, v_cache in caches],
            list(groups),
            embedding,
            None if head is None else head.kernel,
        )
        self._run = kernel.run  # to find it takes longer than some ops
        self._decode = kernel.decode
        self._num_apart = kernel.num_apart

    @property
    def num_apart(self) -> int:
        """Of its runs, those in which each thread had a part of the sequences, where threads otherwise share each op."""
        num: int = self._num_apart()
        return num

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        slot_mappings: Sequence[Tensor],
        block_tables: Sequence[Tensor],
        cu_query_lens: Tensor,
        context_lens: Tensor,
        logits_indices: Tensor | None = None,
        cu_logits_lens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one step.

        Args:
            x: ``[num_tokens, hidden]``, contiguous; with an embedding ``[num_tokens]`` int64, token ids.
            residual: ``[num_tokens, hidden]``, added to the first layer's input; None in a model's first layer.
            positions: see ``rope_kv_write``.
            slot_mappings: slots of each group, see ``rope_kv_write``; contiguous.
            block_tables: of each group, see ``paged_attention``.
            cu_query_lens, context_lens: see ``paged_attention``.
            logits_indices, cu_logits_lens: see ``StepLayout``; behind the last layer's keys and values, no other tokens than
                these are computed. None: all are.
        Returns:
            The last layer's output, which is still to be added, and the running sum of the residual: both new tensors, of all
            tokens or of those at ``logits_indices``. With a head its logits in the place of the output.
        Raises:
            ValueError: a shape, dtype or layout is not as above, or a layer's group is not there.
            IndexError: a token id, position, slot, length or block id is out of range.
        """
        out: tuple[Tensor, Tensor] = self._run(
            x,
            residual,
            positions,
            slot_mappings,
            block_tables,
            cu_query_lens,
            context_lens,
            logits_indices,
            cu_logits_lens,
        )
        return out

    def decode(
        self,
        token_ids: Tensor,
        block_tables: Sequence[Tensor],
        context_lens: Tensor,
        num_steps: int,
        stops: Tensor,
        cu_stops: Tensor,
        sampling: DecodeSampling | None = None,
    ) -> Tensor:
        """Decode several tokens of each sequence: each is chosen from the logits that the one before it gives.

        What would lie between as many steps of one token is left out. Where each thread has sequences of its own, threads meet
        only at the end. It takes an embedding and a head.

        Args:
            token_ids: ``[num_seqs]`` int64, the last token of each sequence.
            block_tables: of each group, see ``paged_attention``; also for the tokens that are to come.
            context_lens: ``[num_seqs]`` int32, tokens of each sequence, with the one in ``token_ids``.
            num_steps: how many tokens each is to get, at least 1.
            stops: int64, tokens that end a sequence, ``cu_stops[i]`` to ``cu_stops[i + 1]`` the i-th.
            cu_stops: ``[num_seqs + 1]`` int32, from 0.
            sampling: None: the likeliest tokens.
        Returns:
            ``[num_steps, num_seqs]`` int64: what ``sample`` chooses. Behind a token that ends a sequence, or where the logits
            give none, NO_TOKEN: it is not computed any further.
        Raises:
            ValueError, IndexError: as a call does, or a sequence would go past its block table.
        """
        settings = sampling or DecodeSampling()
        token_ids_of_steps: Tensor = self._decode(
            token_ids, block_tables, context_lens, num_steps, *settings, stops, cu_stops
        )
        return token_ids_of_steps


def _check_sizes(
    qkv: Linear, output: Linear, gate_up: Linear | None, down: Linear | None, mixture: Mixture | None
) -> None:
    hidden = qkv.in_features
    sizes = [("output.out_features", output.out_features, hidden)]
    if mixture is not None:
        sizes.append(("mixture.hidden_size", mixture.hidden_size, hidden))
    if gate_up is not None and down is not None:
        sizes += [
            ("gate_up.in_features", gate_up.in_features, hidden),
            ("gate_up.out_features", gate_up.out_features, 2 * down.in_features),
            ("down.out_features", down.out_features, hidden),
        ]
    for name, actual, wanted in sizes:
        if actual != wanted:
            raise ValueError(f"{name} is {actual}; beside the other layers it must be {wanted}.")
    for name, linear in (("qkv", qkv), ("output", output), ("gate_up", gate_up), ("down", down)):
        if linear is not None:
            _check_is_packed(name, linear)


def _check_is_packed(name: str, linear: Linear) -> None:
    if linear.kernel is None:
        raise ValueError(f"{name} has no C++ weights. Use a Backend whose name and linear are cpp.")
