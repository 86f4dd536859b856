"""What a decoder layer consists of."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from flyball_kernels import experts
from flyball_kernels.backend import Backend
from flyball_kernels.experts import Assignment, ExpertLinear, Shared
from flyball_kernels.linear import Linear
from flyball_kernels.paged_attention import paged_attention
from flyball_kernels.rms_norm import add_rms_norm, rms_norm
from flyball_kernels.rope_kv_write import rope_kv_write
from flyball_kernels.swiglu import Activation, swiglu


def decoder_layer(
    x: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    *,
    qkv: Linear,
    output: Linear,
    gate_up: Linear | None = None,
    down: Linear | None = None,
    mixture: dict[str, Any] | None = None,
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
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    if residual is None:
        normed, residual = rms_norm(x, attention_norm, eps, offset=norm_offset, backend=backend), x
    else:
        normed, residual = add_rms_norm(x, residual, attention_norm, eps, offset=norm_offset, backend=backend)
    query = rope_kv_write(
        qkv(normed),
        positions,
        cos_sin_cache,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        norm_offset=norm_offset,
        backend=backend,
    )
    attended = paged_attention(
        query,
        k_cache,
        v_cache,
        block_tables,
        cu_query_lens,
        context_lens,
        scale=scale,
        max_query_len=int(cu_query_lens.diff().max()),
        sliding_window=sliding_window,
        softcap=softcap,
        backend=backend,
    )
    normed, residual = add_rms_norm(
        output(attended.flatten(1)), residual, mlp_norm, eps, offset=norm_offset, backend=backend
    )
    if mixture is not None:
        return _mixture(normed, **mixture, backend=backend), residual
    assert gate_up is not None and down is not None
    return down(swiglu(gate_up(normed), activation=activation, backend=backend)), residual


def _mixture(
    x: Tensor,
    *,
    router: Linear,
    gate_up: Sequence[Linear],
    down: Sequence[Linear],
    experts_per_token: int,
    normalizes: bool,
    activation: Activation = "silu",
    shared: tuple[Linear, Linear, Linear] | None = None,
    backend: Backend,
) -> Tensor:
    gated, of_all = partial(swiglu, activation=activation, backend=backend), None
    if shared is not None:
        of_all = Shared(shared[1](gated(shared[0](x))), shared[2](x))

    def of_rows(x: Tensor, assignment: Assignment) -> Tensor:
        first, last = (ExpertLinear(layers, backend=backend) for layers in (gate_up, down))
        return last(gated(first(x, assignment)), assignment)

    return experts.mixture(
        x, router(x), of_rows, experts_per_token, normalizes=normalizes, shared=of_all, backend=backend
    )
