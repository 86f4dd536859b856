"""The feed-forward part of a decoder layer: one gated MLP, or several of which each token uses a few."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from flyball_kernels import Mixture, SharedExpert
from flyball_kernels.experts import Assignment, ExpertLinear, Shared, clamped_swiglu, mixture
from flyball_kernels.linear import Linear
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
        self._activation, self._backend = config.activation, place.backend

    def destinations(self, prefix: str) -> Destinations:
        for index, expert in enumerate(self._experts):
            yield from expert.destinations(f"{prefix}{index}.")

    def pack(self) -> None:
        for expert in self._experts:
            expert.pack()
        parts = zip(*((expert.gate_up_proj.packed, expert.down_proj.packed) for expert in self._experts), strict=True)
        self._gate_up, self._down = (ExpertLinear(layers, backend=self._backend) for layers in parts)
        self._experts.clear()

    @property
    def layers(self) -> tuple[Sequence[Linear], Sequence[Linear]]:
        """The gate and up projections of all experts, and the down projections; on a CPU."""
        return self._gate_up.layers, self._down.layers

    def __call__(self, x: Tensor, assignment: Assignment) -> Tensor:
        """Return ``[num_rows, hidden]``: a row for each token and expert that it uses."""
        gated = swiglu(self._gate_up(x, assignment), activation=self._activation, backend=self._backend)
        return self._down(gated, assignment)


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
            ExpertLinear(
                [self._place.linear(*parts) for parts in zip(*buffers, strict=True)], backend=self._place.backend
            )
            for buffers in self._buffers.values()
        )
        self._buffers.clear()

    def __call__(self, x: Tensor, assignment: Assignment) -> Tensor:
        """As ``Experts``."""
        gate_up = self._gate_up(x, assignment)
        gated = clamped_swiglu(gate_up, self._clamp.limit, self._clamp.alpha, backend=self._place.backend)
        return self._down(gated, assignment)


class MixtureOfExperts:
    """MLPs of which a router picks some for each token (Shazeer et al. 2017), and one for all tokens where there is one.

    The rows of a step are sorted by expert, so an expert that is used costs one pass over its weights.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, place: Place) -> None:
        self.moe, self._activation, self._backend = moe, config.activation, place.backend
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

    def as_part(self) -> Mixture | None:
        """Return the mixture as a part of a layer that is one op, if it has C++ linear layers alone and no clamp."""
        if not isinstance(self.experts, Experts):
            return None
        (gate_up, down), router, shared = self.experts.layers, self.router.packed, None
        if self.shared is not None:
            shared = SharedExpert(
                self.shared.gate_up_proj.packed, self.shared.down_proj.packed, self.shared_gate.packed
            )
        if any(linear.kernel is None for linear in (router, *gate_up[:1], *down[:1], *(shared or ()))):
            return None
        return Mixture(
            router=router,
            gate_up=gate_up,
            down=down,
            experts_per_token=self.moe.experts_per_token,
            normalizes=self.moe.normalizes_weights,
            activation=self._activation,
            shared=shared,
        )

    def __call__(self, x: Tensor, adapted: AdaptedStep = ()) -> Tensor:
        shared = None
        if self.shared is not None:
            shared = Shared(self.shared(x, adapted), self.shared_gate(x))
        return mixture(
            x,
            self.router(x),
            self.experts,
            self.moe.experts_per_token,
            normalizes=self.moe.normalizes_weights,
            shared=shared,
            backend=self._backend,
        )
