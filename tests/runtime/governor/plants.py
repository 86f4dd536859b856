"""Made-up machines: what their steps cost, and loads to run on them."""

import random
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial

from flyball_protocol import StepModel
from flyball_runtime.governor import StepTimeLearner
from flyball_runtime.governor.work import Work

LINEAR = StepModel(base_s=0.011, token_s=6e-5, context_token_s=8e-8, attention_pair_s=3e-9)
KNEE = StepModel(base_s=0.011, token_s=6e-5, knee_tokens=160, context_token_s=8e-8, attention_pair_s=3e-9)
INTERACTION = StepModel(base_s=0.011, token_s=6e-5, context_token_s=8e-8, attention_pair_s=3e-9, interaction_s=4e-7)
CPU = StepModel(base_s=0.004, token_s=1.2e-3, context_token_s=2e-6, attention_pair_s=1e-7)
L4 = StepModel(base_s=0.054, token_s=1.6e-4, knee_tokens=331, context_token_s=4.4e-7, attention_pair_s=8e-9)
"""8B parameters on an L4. Below 331 tokens, a step takes as long as reading the weights."""
THROTTLED = StepModel(base_s=0.0012, token_s=2.5e-5, context_token_s=1e-8, attention_pair_s=2e-9)
"""A small model on a share of a core; see ``throttled()``."""
PLANTS = {"linear": LINEAR, "knee": KNEE, "interaction": INTERACTION, "cpu": CPU}


def decodes_only(rng: random.Random, num_steps: int) -> Iterator[Work]:
    """Yield what steady serving computes: every regressor moves with the number of sequences."""
    decodes = 40
    for _ in range(num_steps):
        decodes = min(100, max(1, decodes + rng.choice((-1, 0, 0, 1))))
        yield Work(0, decodes, int(decodes * 1200 * rng.uniform(0.9, 1.1)), 0)


def mixed(rng: random.Random, num_steps: int) -> Iterator[Work]:
    """Yield steps with between 1 and 100 decodes, four of ten with a chunk of a prompt."""
    for _ in range(num_steps):
        decodes = rng.randint(1, 100)
        context = int(decodes * rng.uniform(600, 1800))
        chunk = rng.randint(16, 512) if rng.random() < 0.4 else 0
        start = rng.choice((0, 0, 512, 2048, 8000))
        yield Work(chunk, decodes, context, pairs(chunk, start))


def paced(rng: random.Random, learner: StepTimeLearner, plant: StepModel, num_steps: int, target_s: float) -> None:
    """Serve prompts in the largest chunks that the learner takes to fit into the target, and have it learn from each step.

    The first 40 steps have no target.
    """
    decodes, left, start = 20, 0, 0
    for step in range(num_steps):
        decodes = min(30, max(4, decodes + rng.choice((-1, 0, 1))))
        context = int(decodes * rng.uniform(900, 1100))
        if not left and rng.random() < 0.5:
            left, start = int(rng.lognormvariate(6.6, 0.8)), 0
        model, most = learner.coefficients, min(left, 2048)
        if model is not None and step >= 40:
            times_s = partial(_predicted_s, model, start, decodes, context)
            most = max(0, bisect_right(range(most + 1), target_s, key=times_s) - 1)
        work = Work(most, decodes, context, pairs(most, start))
        learner.observe(work, took(rng, plant, work, 0.05))
        left, start = left - most, start + most


def _predicted_s(model: StepModel, start: int, decodes: int, context: int, chunk: int) -> float:
    return model.predict(chunk, decodes, context, pairs(chunk, start))


def pairs(chunk: int, start: int) -> int:
    """Return the attention pairs of a chunk that follows ``start`` tokens of its prompt."""
    return chunk * start + chunk * (chunk + 1) // 2


def throttled(rng: random.Random, num_steps: int, noise: float, share: float = 0.17) -> Iterator[tuple[Work, float]]:
    """Yield steps of THROTTLED and the times measured: a CPU limit interrupts a share of them for 60 ms, like CFS does."""
    for work in mixed(rng, num_steps):
        waits_s = rng.gauss(0.060, 0.002) if rng.random() < share else 0.0
        yield work, took(rng, THROTTLED, work, noise) + waits_s


def took(rng: random.Random, plant: StepModel, work: Work, noise: float, slower: float = 1.0) -> float:
    """Return a measured time: noise is a share of it, and one step in 2000 hiccups."""
    hiccup = 4.0 if rng.random() < 0.0005 else 1.0
    return slower * plant.predict(*work) * max(0.2, rng.gauss(1.0, noise)) * hiccup
