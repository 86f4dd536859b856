"""An objective that no limits can meet costs next to nothing of what is served without it."""

import pytest

from flyball_operator.spec import Objectives, Tuning
from flyball_simulation.controllers import Auto, Controller, Static
from flyball_simulation.plant import PROFILES, Disturbances, Plant
from flyball_simulation.result import Bounds
from flyball_simulation.workload import burst
from flyball_simulation.world import Setup, World

EVEN = Plant(shape="linear", overhead_s=0.010, weights_s=0.0, token_s=0.001, context_token_s=0.0, attention_pair_s=0.0)
"""A step takes 10 ms and 1 ms for each token."""


def seconds(plant: Plant, controller: Controller, itl_ms: int) -> float:
    """Return how long two replicas take to serve a burst."""
    setup = Setup(
        name="made up",
        plant=plant,
        disturbances=Disturbances(noise=0.05),
        replicas=2,
        kv_tokens=32_768,
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        objectives=Bounds(itl_s=itl_ms / 1000),
    )
    world = World(setup, burst(0.0, 100, 2.0, 200, 60), controller, 1)
    world.run()
    return max(one.end_s for one in world.outcomes())


@pytest.mark.parametrize(("plant", "itl_ms"), [(EVEN, 5), (PROFILES["l4"].plant, 20), (PROFILES["cpu"].plant, 2)])
def test_an_objective_that_no_step_can_meet_starves_nobody(plant: Plant, itl_ms: int) -> None:
    tuning = Tuning(
        mode="Auto",
        interval_seconds=2,
        cooldown_seconds=10,
        min_samples=20,
        max_step_percent=25,
        objectives=Objectives(inter_token_latency_p95_milliseconds=itl_ms),
    )
    auto = Auto(tuning, "made up")
    assert seconds(plant, auto, itl_ms) <= seconds(plant, Static(), itl_ms) / 0.8
    assert auto.records
