"""The feed-forward part of a decoder layer: one gated MLP, or several of which each token uses a few."""

from collections.abc import Iterator

import torch
from torch import Tensor

from flyball_kernels.swiglu import swiglu
from flyball_runtime.core.model_config import ModelConfig, MoEConfig
from flyball_runtime.model.linear import AdaptedStep, Destinations, FusedLinear, Place, Projection


class MLP:
    """A gated linear unit (Shazeer 2020): SwiGLU, or GeGLU.

    Args:
        size: of the inner layer.
        names: of the gate, up and down projections in the checkpoint; two where gate and up are one tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        place: Place,
        *,
        size: int,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        *gate_up, down = names
        parts = dict.fromkeys(gate_up, 2 * size // len(gate_up))
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=config.mlp_bias, place=place)
        self.down_proj = FusedLinear(size, {down: config.hidden_size}, bias=config.mlp_bias, place=place)
        self.activation = config.activation
        self.backend = place.backend

    @classmethod
    def dense(cls, config: ModelConfig, place: Place) -> "MLP":
        """Return the MLP of a layer without experts."""
        if config.fused_projections:
            return cls(config, place, size=config.intermediate_size, names=("gate_up_proj", "down_proj"))
        return cls(config, place, size=config.intermediate_size)

    def destinations(self, prefix: str) -> Destinations:
        yield from self.gate_up_proj.destinations(prefix)
        yield from self.down_proj.destinations(prefix)

    def projections(self, prefix: str) -> Iterator[tuple[str, Projection]]:
        yield from self.gate_up_proj.projections(prefix)
        yield from self.down_proj.projections(prefix)

    def pack(self) -> None:
        self.gate_up_proj.pack()
        self.down_proj.pack()

    def __call__(self, x: Tensor, adapted: AdaptedStep = ()) -> Tensor:
        gated = swiglu(self.gate_up_proj(x, adapted), activation=self.activation, backend=self.backend)
        return self.down_proj(gated, adapted)


class Experts:
    """MLPs, each with tensors of its own."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, place: Place) -> None:
        self._experts = [
            MLP(config, place, size=moe.intermediate_size, names=moe.expert_names) for _ in range(moe.num_experts)
        ]

    def destinations(self, prefix: str) -> Destinations:
        for index, expert in enumerate(self._experts):
            yield from expert.destinations(f"{prefix}{index}.")

    def pack(self) -> None:
        for expert in self._experts:
            expert.pack()

    def run(self, index: int, x: Tensor) -> Tensor:
        return self._experts[index](x)


class StackedExperts:
    """MLPs whose weights are one tensor for each projection, with biases; gate and up take turns in it (gpt-oss)."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, place: Place) -> None:
        assert moe.clamp is not None
        hidden, inner = config.hidden_size, moe.intermediate_size
        self._buffers = {
            name: (place.empty(moe.num_experts, rows, columns), place.empty(moe.num_experts, rows))
            for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner))
        }
        self._clamp, self._place = moe.clamp, place

    def destinations(self, prefix: str) -> Destinations:
        for name, (weights, biases) in self._buffers.items():
            yield f"{prefix}{name}", weights.transpose(1, 2)  # the checkpoint's are transposed
            yield f"{prefix}{name}_bias", biases

    def pack(self) -> None:
        self._gate_up, self._down = (
            [self._place.linear(*parts) for parts in zip(*buffers, strict=True)] for buffers in self._buffers.values()
        )
        self._buffers.clear()

    def run(self, index: int, x: Tensor) -> Tensor:
        gate, up = self._gate_up[index](x).float().unflatten(1, (-1, 2)).unbind(-1)
        gate = gate.clamp(max=self._clamp.limit)
        up = up.clamp(-self._clamp.limit, self._clamp.limit)
        return self._down[index](((up + 1.0) * gate * torch.sigmoid(gate * self._clamp.alpha)).to(x.dtype))


class MixtureOfExperts:
    """MLPs of which a router picks some for each token (Shazeer et al. 2017), and one for all tokens where there is one.

    The rows of a step are sorted by expert, so an expert that is used costs one pass over its weights.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, place: Place) -> None:
        self.moe = moe
        is_stacked = moe.clamp is not None
        router = {"router" if is_stacked else "gate": moe.num_experts}
        self.router = FusedLinear(config.hidden_size, router, bias=is_stacked, place=place, exact=True)
        self.experts = StackedExperts(config, moe, place) if is_stacked else Experts(config, moe, place)
        self.shared: MLP | None = None
        if moe.shared_intermediate_size is not None:
            self.shared = MLP(config, place, size=moe.shared_intermediate_size)
            self.shared_gate = FusedLinear(
                config.hidden_size, {"shared_expert_gate": 1}, bias=False, place=place, exact=True
            )

    def destinations(self, prefix: str) -> Destinations:
        yield from self.router.destinations(prefix)
        yield from self.experts.destinations(f"{prefix}experts.")
        if self.shared is not None:
            yield from self.shared.destinations(f"{prefix}shared_expert.")
            yield from self.shared_gate.destinations(prefix)

    def projections(self, prefix: str) -> Iterator[tuple[str, Projection]]:
        """Yield those of the MLP that all tokens use: a step sorts the rows of the others by expert."""
        if self.shared is not None:
            yield from self.shared.projections(f"{prefix}shared_expert.")

    def pack(self) -> None:
        self.router.pack()
        self.experts.pack()
        if self.shared is not None:
            self.shared.pack()
            self.shared_gate.pack()

    def __call__(self, x: Tensor, adapted: AdaptedStep = ()) -> Tensor:
        weights, chosen = self._route(x)
        out = _weighted_sum(self._run_experts(x, chosen), weights)
        if self.shared is not None:
            out = out + self.shared_gate(x).float().sigmoid() * self.shared(x, adapted).float()
        return out.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of each token's experts, both ``[num_tokens, experts_per_token]``."""
        weights, chosen = self.router(x).float().softmax(dim=-1).topk(self.moe.experts_per_token, dim=-1)
        if self.moe.normalizes_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def _run_experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return what each chosen expert makes of its token, ``[num_tokens, experts_per_token, hidden]``."""
        order = chosen.flatten().argsort(stable=True)
        num_rows = chosen.flatten().bincount(minlength=self.moe.num_experts).tolist()
        rows = x[order // chosen.shape[1]]
        out = torch.empty_like(rows)
        out[order] = torch.cat(
            [self.experts.run(index, part) for index, part in enumerate(rows.split(num_rows)) if part.shape[0]]
        )
        return out.unflatten(0, chosen.shape)


def _weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return ``[num_tokens, hidden]`` fp32; added one after another, so that a token's sum is the same in any batch."""
    total = outputs[:, 0].float() * weights[:, 0, None]
    for index in range(1, outputs.shape[1]):
        total += outputs[:, index].float() * weights[:, index, None]
    return total
