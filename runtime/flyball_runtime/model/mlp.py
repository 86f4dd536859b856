"""The feed-forward part of a decoder layer: one gated MLP, or several of which each token uses a few."""

import torch
from torch import Tensor

from flyball_kernels.swiglu import swiglu
from flyball_runtime.core.model_config import ModelConfig, MoEConfig
from flyball_runtime.model.linear import Destinations, FusedLinear, Place


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

    def pack(self) -> None:
        self.gate_up_proj.pack()
        self.down_proj.pack()

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x), activation=self.activation, backend=self.backend))


class MixtureOfExperts:
    """MLPs of which a router picks some for each token (Shazeer et al. 2017), and one for all tokens where there is one.

    The rows of a step are sorted by expert, so an expert that is used costs one pass over its weights.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, place: Place) -> None:
        self.moe = moe
        self.router = FusedLinear(config.hidden_size, {"gate": moe.num_experts}, bias=False, place=place)
        self.experts = [
            MLP(config, place, size=moe.intermediate_size, names=moe.expert_names) for _ in range(moe.num_experts)
        ]
        self.shared: MLP | None = None
        if moe.shared_intermediate_size is not None:
            self.shared = MLP(config, place, size=moe.shared_intermediate_size)
            self.shared_gate = FusedLinear(config.hidden_size, {"shared_expert_gate": 1}, bias=False, place=place)

    def destinations(self, prefix: str) -> Destinations:
        yield from self.router.destinations(prefix)
        for index, expert in enumerate(self.experts):
            yield from expert.destinations(f"{prefix}experts.{index}.")
        if self.shared is not None:
            yield from self.shared.destinations(f"{prefix}shared_expert.")
            yield from self.shared_gate.destinations(prefix)

    def pack(self) -> None:
        self.router.pack()
        for expert in self.experts:
            expert.pack()
        if self.shared is not None:
            self.shared.pack()
            self.shared_gate.pack()

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        out = _weighted_sum(self._run_experts(x, chosen), weights)
        if self.shared is not None:
            out = out + self.shared_gate(x).float().sigmoid() * self.shared(x).float()
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
        num_rows = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = x[order // chosen.shape[1]]
        out = torch.empty_like(rows)
        out[order] = torch.cat(
            [expert(part) for expert, part in zip(self.experts, rows.split(num_rows), strict=True) if part.shape[0]]
        )
        return out.unflatten(0, chosen.shape)


def _weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return ``[num_tokens, hidden]`` fp32; added one after another, so that a token's sum is the same in any batch."""
    total = outputs[:, 0].float() * weights[:, 0, None]
    for index in range(1, outputs.shape[1]):
        total += outputs[:, index].float() * weights[:, index, None]
    return total
