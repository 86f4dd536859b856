"""Which objectives are feasible: from runs that were made once."""

import math

from msgspec import structs

from flyball_simulation.feasibility import GRID, Explored, explore, feasible, frontier
from flyball_simulation.plant import PROFILES, Disturbances
from flyball_simulation.result import Bounds
from flyball_simulation.workload import burst
from flyball_simulation.world import Setup

SETUP = Setup(
    name="a100",
    plant=PROFILES["a100"].plant,
    disturbances=Disturbances(noise=0.0),
    kv_tokens=32_768,
    max_model_len=4096,
    objectives=Bounds(ttft_s=1.0, itl_s=0.02),
)
FAST = [(0.1, 0.010)] * 19 + [(0.1, 0.500)]
SLOW = [(0.1, 0.050)] * 10 + [(0.9, 0.050)] * 10


def test_the_frontier_is_the_lowest_bound_that_19_of_20_meet() -> None:
    runs = [Explored(1, (32, 128), FAST), Explored(1, (256, 512), SLOW), Explored(2, (32, 128), FAST)]
    corners = frontier(runs, 1, [0.05, 0.5, 1.0])
    assert [(one.ttft_s, one.itl_s, one.limits) for one in corners] == [
        (0.5, 0.010, (32, 128)),
        (1.0, 0.010, (32, 128)),
    ]
    assert frontier([Explored(1, (32, 128), SLOW)], 1, [0.5, 1.0])[0].ttft_s == 1.0


def test_a_failed_request_is_never_good() -> None:
    runs = [Explored(1, (32, 128), [(math.inf, 0.0)] * 2 + [(0.1, 0.01)] * 8)]
    assert frontier(runs, 1, [10.0]) == []
    (found,) = feasible(runs, SETUP)
    assert (found.share_good, found.is_feasible) == (0.8, False)


def test_more_replicas_make_more_feasible() -> None:
    crowd = burst(0.0, 60, 1.0, 800, 20)
    setup = structs.replace(SETUP, replicas=2, objectives=Bounds(ttft_s=0.9, itl_s=0.05))
    explored = explore(setup, crowd, seed=0, num_processes=1)
    assert len(explored) == 2 * len(GRID)
    one, two = feasible(explored, setup)
    assert two.share_good > one.share_good
    assert {one.replicas, two.replicas} == {1, 2}
