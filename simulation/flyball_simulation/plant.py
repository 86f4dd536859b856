"""What a step of the engine truly costs: the part of the world that a tuner has to find out.

The form is that of a GPU's roofline: reading the weights or computing the tokens, whichever takes longer, then attention.
Sources of the profiles: docs/simulation.md.
"""

import math
import random
from typing import Literal

from msgspec import Struct, structs

Shape = Literal["linear", "knee", "interaction"]

INTERACTION_TOKENS = 256.0
"""In the interaction shape, each decode makes a prefill token dearer by one part in so many."""


class Plant(Struct, frozen=True, kw_only=True):
    """The step time of one device and model. All times are seconds.

    Attributes:
        shape: ``knee`` takes the longer of weights and tokens; ``linear`` their sum; ``interaction`` is a knee whose prefill
            tokens cost more the more sequences decode beside them.
        overhead_s: of every step.
        weights_s: reading the weights once.
        token_s: computing one token, attention aside.
        decode_s: of each sequence that decodes, beside its token; below 0 where that costs less than a prompt's.
        context_token_s: reading one token of the KV cache, for a decode.
        attention_pair_s: a prefill token that attends to one other.
        after_prompt: share by which a step without a prompt takes longer right after one with; the second one by a half of it,
            the third one by a third, and so on. So it was measured on CPUs, whose caches and clock recover.
    """

    shape: Shape = "knee"
    overhead_s: float
    weights_s: float
    token_s: float
    decode_s: float = 0.0
    context_token_s: float
    attention_pair_s: float
    after_prompt: float = 0.0

    def seconds(self, prefill_tokens: int, decodes: int, context_tokens: int, attention_pairs: int) -> float:
        """Return the step time without disturbances, long after the last prompt."""
        compute_s = self.token_s * (prefill_tokens + decodes)
        if self.shape == "linear":
            dense_s = self.weights_s + compute_s
        else:
            if self.shape == "interaction":
                compute_s += self.token_s / INTERACTION_TOKENS * prefill_tokens * decodes
            dense_s = self.weights_s if self.weights_s > compute_s else compute_s
        return (
            self.overhead_s
            + dense_s
            + self.decode_s * decodes
            + self.context_token_s * context_tokens
            + self.attention_pair_s * attention_pairs
        )


class SlowDown(Struct, frozen=True, kw_only=True):
    """A co-tenant or a throttled device: steps take ``factor`` times as long from ``start_s`` to ``end_s``.

    Attributes:
        replica: index of the replica that it hits; None hits all.
    """

    factor: float
    start_s: float
    end_s: float
    replica: int | None = None


class CpuLimit(Struct, frozen=True, kw_only=True):
    """What the kernel's scheduler (CFS) does to a container with a share of a core: it runs until its share of a period is
    used up, and waits for the next period.
    """

    share: float
    period_s: float = 0.1


class Disturbances(Struct, frozen=True, kw_only=True):
    """What no model predicts.

    Attributes:
        noise: standard deviation of a step's time, as a share of it.
        hiccup_share: share of the steps that take ``hiccup_factor`` times as long.
    """

    noise: float = 0.05
    hiccup_share: float = 0.0
    hiccup_factor: float = 4.0
    slow_downs: tuple[SlowDown, ...] = ()
    cpu_limit: CpuLimit | None = None


class Profile(Struct, frozen=True, kw_only=True):
    """A device that serves a model.

    Attributes:
        device: in words, the model included.
        kv_tokens: tokens that its KV cache holds, unless a run says otherwise.
        max_model_len: longest sequence, unless a manifest says otherwise.
        vllm_max_num_seqs, vllm_max_num_batched_tokens: what vLLM starts an API server with on this device.
    """

    device: str
    plant: Plant
    kv_tokens: int
    max_model_len: int
    vllm_max_num_seqs: int
    vllm_max_num_batched_tokens: int


PROFILES: dict[str, Profile] = {
    "cpu": Profile(
        device="88M parameters in bfloat16 on 2 cores of a Xeon with AMX",
        plant=Plant(
            shape="linear",
            overhead_s=1.0e-3,
            weights_s=4.5e-3,
            token_s=1.5e-4,
            decode_s=1.5e-4,
            context_token_s=6.0e-7,
            attention_pair_s=1.65e-7,
        ),
        kv_tokens=32_768,
        max_model_len=8192,
        vllm_max_num_seqs=128,
        vllm_max_num_batched_tokens=2048,
    ),
    "l4": Profile(
        device="8B parameters in bfloat16 on an L4",
        plant=Plant(
            overhead_s=1.0e-3,
            weights_s=53.0e-3,
            token_s=1.6e-4,
            context_token_s=4.4e-7,
            attention_pair_s=8.0e-9,
        ),
        kv_tokens=43_008,
        max_model_len=16_384,
        vllm_max_num_seqs=256,
        vllm_max_num_batched_tokens=2048,
    ),
    "a100": Profile(
        device="8B parameters in bfloat16 on an A100 with 80 GB",
        plant=Plant(
            overhead_s=1.0e-3,
            weights_s=10.0e-3,
            token_s=6.0e-5,
            context_token_s=8.0e-8,
            attention_pair_s=3.0e-9,
        ),
        kv_tokens=390_000,
        max_model_len=32_768,
        vllm_max_num_seqs=256,
        vllm_max_num_batched_tokens=2048,
    ),
    "h200": Profile(
        device="8B parameters in bfloat16 on an H200",
        plant=Plant(
            overhead_s=1.0e-3,
            weights_s=3.5e-3,
            token_s=2.2e-5,
            context_token_s=3.0e-8,
            attention_pair_s=1.0e-9,
        ),
        kv_tokens=800_000,
        max_model_len=65_536,
        vllm_max_num_seqs=1024,
        vllm_max_num_batched_tokens=8192,
    ),
}
"""By the name that ``--plant`` takes."""


class Device:
    """One replica's plant with its disturbances; two of the same seed take the same time for the same steps."""

    def __init__(self, plant: Plant, disturbances: Disturbances, replica: int, seed: int) -> None:
        self._plant = plant
        self._disturbances = disturbances
        self._slow_downs = [one for one in disturbances.slow_downs if one.replica in (None, replica)]
        self._random = random.Random(f"{seed}/{replica}")
        self._period, self._used_s = 0, 0.0
        self._since_prompt = math.inf  # steps

    def seconds(
        self, now_s: float, prefill_tokens: int, decodes: int, context_tokens: int, attention_pairs: int
    ) -> float:
        """Return how long a step takes that begins at ``now_s``."""
        known_s = self._plant.seconds(prefill_tokens, decodes, context_tokens, attention_pairs)
        if self._plant.after_prompt:
            self._since_prompt = 0 if prefill_tokens else self._since_prompt + 1
            if self._since_prompt:
                known_s *= 1.0 + self._plant.after_prompt / self._since_prompt
        rest = self._disturbances
        if rest.noise:
            known_s *= max(0.3, self._random.gauss(1.0, rest.noise))
        if rest.hiccup_share and self._random.random() < rest.hiccup_share:
            known_s *= rest.hiccup_factor
        for one in self._slow_downs:
            if one.start_s <= now_s < one.end_s:
                known_s *= one.factor
        return known_s if rest.cpu_limit is None else self._limited(now_s, known_s, rest.cpu_limit)

    def _limited(self, now_s: float, cpu_s: float, limit: CpuLimit) -> float:
        """Return how long it takes to get so much CPU time."""
        end_s, period_s = now_s, limit.period_s
        while cpu_s > 0.0:
            period = int(end_s / period_s + 1e-6)
            if period != self._period:
                self._period, self._used_s = period, 0.0
            next_s = (period + 1) * period_s
            runs_s = max(0.0, min(cpu_s, limit.share * period_s - self._used_s, next_s - end_s))
            self._used_s, end_s, cpu_s = self._used_s + runs_s, end_s + runs_s, cpu_s - runs_s
            if cpu_s > 0.0:
                end_s = next_s
        return end_s - now_s


def shaped(plant: Plant, shape: Shape | None) -> Plant:
    """Return the plant in another shape; None leaves it as it is."""
    return plant if shape is None else structs.replace(plant, shape=shape)
