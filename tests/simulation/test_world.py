"""The simulated world: the real engine on a plant, the balancer, the controllers, what is counted."""

import pytest
from msgspec import structs

from flyball_operator.spec import Objectives, Tuning
from flyball_protocol import LimitsChange, LimitsUpdate, ObjectiveCounts
from flyball_protocol import Objectives as ObjectiveTimes
from flyball_runtime.core.errors import ConfigError
from flyball_simulation import oracle
from flyball_simulation.controllers import Aimd, Auto, Controller, Rules, Static
from flyball_simulation.memory import Memory, Taken
from flyball_simulation.oracle import best, sweep
from flyball_simulation.plant import PROFILES, Device, Disturbances, Plant, SlowDown, shaped
from flyball_simulation.result import Bounds, Result, Tried
from flyball_simulation.scrape import Faults, Restart, Window
from flyball_simulation.workload import Arrival, Phase, burst, generate
from flyball_simulation.world import Setup, World, simulate

EVEN = Plant(shape="linear", overhead_s=0.010, weights_s=0.0, token_s=0.001, context_token_s=0.0, attention_pair_s=0.0)
"""A step takes 10 ms and 1 ms for each token."""

TUNING = Tuning(
    mode="Auto",
    interval_seconds=15,
    cooldown_seconds=60,
    min_samples=50,
    max_step_percent=25,
    objectives=Objectives(ttft_p95_milliseconds=2000, inter_token_latency_p95_milliseconds=50),
)

SETUP = Setup(
    name="even",
    plant=EVEN,
    disturbances=Disturbances(noise=0.0),
    kv_tokens=16_384,
    max_model_len=2048,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    objectives=Bounds(ttft_s=1.0, itl_s=0.02),
)


def run(setup: Setup, workload: list[Arrival], controller: Controller | None = None, seed: int = 0) -> Result:
    return simulate(setup, workload, controller or Static(), label="test", seed=seed, duration_s=60.0)


def test_one_request_takes_its_prompt_and_then_a_step_for_each_token() -> None:
    result = run(SETUP, [Arrival(1.0, 100, 5)])
    assert result.ttft_p95_s == pytest.approx(0.110)
    assert result.itl_p95_s == pytest.approx(0.011)
    assert (result.num_good, result.num_steps) == (1, 5)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    result = run(structs.replace(SETUP, max_num_batched_tokens=64), [Arrival(0.0, 128, 1)])
    assert result.ttft_p95_s == pytest.approx(2 * 0.010 + 0.128)


def test_a_request_waits_for_the_step_that_runs_when_it_comes() -> None:
    result = run(SETUP, [Arrival(0.0, 100, 1), Arrival(0.050, 10, 1)])
    assert result.ttft_p95_s == pytest.approx(0.110, abs=0.005)
    assert result.ttft_p50_s == pytest.approx((0.110 + 0.080) / 2)


def test_a_gap_over_the_objective_makes_a_request_bad() -> None:
    slow = [Arrival(0.0, 10, 3), Arrival(0.0205, 500, 1)]  # its prompt is computed beside the first one's decode
    result = run(SETUP, slow)
    assert (result.num_requests, result.num_good) == (2, 1)


def test_replicas_share_the_load() -> None:
    both = burst(0.0, 40, 1.0, 200, 20)
    one, two = run(SETUP, both), run(structs.replace(SETUP, replicas=2), both)
    assert two.ttft_p95_s is not None and one.ttft_p95_s is not None
    assert two.ttft_p95_s < 0.6 * one.ttft_p95_s
    assert len(two.final_limits) == 2


def test_a_request_that_can_never_run_is_a_failed_one() -> None:
    result = run(SETUP, [Arrival(0.0, 5000, 5), Arrival(0.0, 10, 5)])
    assert (result.num_requests, result.num_failed, result.num_good) == (2, 1, 1)


def test_a_kv_cache_too_small_for_the_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="one sequence of --max-model-len 2048 needs 128 blocks"):
        run(structs.replace(SETUP, kv_tokens=1024), [Arrival(0.0, 10, 1)])


def test_memory_short_of_kv_blocks_preempts() -> None:
    crowd = burst(0.0, 30, 0.1, 500, 500)
    result = run(structs.replace(SETUP, kv_tokens=4096), crowd)
    assert result.num_preemptions > 0
    assert result.num_failed == 0


class Watched(Static):
    """Fixed limits, measured all the same."""

    reads_evidence = True
    paces = True


def test_what_nobody_reads_is_not_measured_and_changes_nothing() -> None:
    crowd = [*burst(0.0, 30, 0.1, 500, 500), *burst(0.0, 5, 0.1, 513, 9)]
    setup = structs.replace(SETUP, kv_tokens=4096, max_num_batched_tokens=128, disturbances=Disturbances(noise=0.1))
    plain, watched = run(setup, crowd), run(setup, crowd, Watched())
    assert plain.num_preemptions > 0
    plain.steps_per_s = watched.steps_per_s = 0.0  # of the wall clock
    assert plain.to_json() == watched.to_json()


def test_gaps_are_those_that_the_runtime_measures_also_of_what_is_preempted() -> None:
    world = World(structs.replace(SETUP, kv_tokens=4096), burst(0.0, 30, 0.1, 500, 500), Watched(), 1)
    world.run()
    (replica,) = world.replicas
    assert replica is not None
    counts, total = replica.measurements.itl.totals()
    assert replica.num_preemptions > 0
    assert len(replica.gaps) == sum(counts)
    assert sum(replica.gaps) == pytest.approx(total)


def test_a_shared_prefix_is_computed_once() -> None:
    alone = run(SETUP, [Arrival(0.0, 1024, 1), Arrival(5.0, 1024, 1)])
    shared = run(SETUP, [Arrival(0.0, 1024, 1, (7, 8)), Arrival(5.0, 1024, 1, (7, 8))])
    assert shared.ttft_p50_s is not None and alone.ttft_p50_s is not None
    assert shared.ttft_p50_s < 0.7 * alone.ttft_p50_s


@pytest.mark.parametrize("controller", [Static, lambda: Rules(TUNING), lambda: Auto(TUNING, "x"), lambda: Aimd(TUNING)])
def test_the_same_seed_gives_the_same_result(controller: type[Static]) -> None:
    setup = structs.replace(
        SETUP, disturbances=Disturbances(noise=0.25, hiccup_share=0.01), faults=Faults(jitter_s=2, loss=0.2)
    )
    work = generate([Phase(mix="code", rate=1.0, seconds=90)], 3)
    work = [one._replace(input_len=min(one.input_len, 1500), output_len=min(one.output_len, 100)) for one in work]
    first, again, other = (run(setup, work, controller(), seed) for seed in (1, 1, 2))
    for result in (first, again, other):
        result.steps_per_s = 0.0  # of the wall clock
    assert first.to_json() == again.to_json()
    assert first.to_json() != other.to_json()


def test_a_tuner_cuts_the_budget_where_gaps_are_too_long() -> None:
    work = generate([Phase(mix="chat", rate=5.0, seconds=200)], 1)
    setup = structs.replace(
        SETUP,
        plant=PROFILES["a100"].plant,
        kv_tokens=390_000,
        max_model_len=16_384,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        objectives=Bounds(ttft_s=2.0, itl_s=0.05),
    )
    static, rules = run(setup, work), run(setup, work, Rules(TUNING))
    assert rules.num_changes > 0
    assert rules.share_good > static.share_good
    assert next(iter(rules.final_limits.values())).max_num_batched_tokens < 2048


def test_every_decision_of_the_tuner_replays() -> None:
    work = generate([Phase(mix="chat", rate=2.0, seconds=150)], 1)
    setup = structs.replace(SETUP, plant=PROFILES["a100"].plant, kv_tokens=390_000, max_model_len=16_384)
    result = run(setup, work, Auto(TUNING, "x"))
    assert result.num_decisions > 0
    assert result.num_replayed == result.num_decisions


def test_the_kv_share_grows_into_free_memory_and_gives_it_back_to_a_neighbour() -> None:
    gib = 2**30
    memory = Memory(
        limit_bytes=16 * gib,
        pool_max_bytes=8 * gib,
        rest_bytes=2 * gib,
        neighbours=(Taken(num_bytes=13 * gib, start_s=80.0, end_s=1e9),),
    )
    setup = structs.replace(SETUP, kv_tokens=32_768, kv_start_tokens=4096, memory=memory, max_num_batched_tokens=256)
    work = [Arrival(0.5 * number, 300, 300) for number in range(140)] + [Arrival(250.0, 300, 3)]
    result = run(setup, work, Auto(structs.replace(TUNING, interval_seconds=5), "x"))
    moves = {one.reason: one.limits.kv_cache_fraction for one in result.changes}
    assert moves["KVBlocked"] > 0.125
    assert moves["MemoryPressure"] < moves["KVBlocked"]
    assert result.num_failed == 0


def test_a_replica_that_dies_fails_what_it_had_and_comes_back_as_another() -> None:
    faults = Faults(restarts=(Restart(at_s=1.0, replica=0, down_s=2.0),))
    work = [Arrival(0.9, 400, 50), Arrival(2.0, 10, 1), Arrival(4.0, 10, 1)]
    result = run(structs.replace(SETUP, faults=faults), work)
    assert result.num_failed == 2
    assert list(result.final_limits) == ["replica-1"]


def test_a_slow_down_ends_when_it_says() -> None:
    rest = Disturbances(noise=0.0, slow_downs=(SlowDown(factor=3.0, start_s=1.0, end_s=2.0, replica=0),))
    device = Device(EVEN, rest, 0, 0)
    assert [device.seconds(now, 10, 0, 0, 0) for now in (0.0, 1.5, 2.0)] == pytest.approx([0.02, 0.06, 0.02])
    assert Device(EVEN, rest, 1, 0).seconds(1.5, 10, 0, 0, 0) == pytest.approx(0.02)


def test_shapes_cost_what_they_say() -> None:
    knee = PROFILES["a100"].plant
    assert knee.seconds(0, 1, 0, 0) == knee.seconds(0, 100, 0, 0)  # the weights are read once for all
    linear, mixed = shaped(knee, "linear"), shaped(knee, "interaction")
    assert linear.seconds(0, 100, 0, 0) > linear.seconds(0, 1, 0, 0)
    assert mixed.seconds(512, 64, 0, 0) > knee.seconds(512, 64, 0, 0)
    assert mixed.seconds(512, 0, 0, 0) == knee.seconds(512, 0, 0, 0)


def test_a_silent_stretch_reaches_the_controller_as_problems() -> None:
    class Watching(Watched):
        interval_s = 5.0
        seen: list[list[str]] = []  # noqa: RUF012

        def round(self, evidence, now_s):  # type: ignore[no-untyped-def]
            self.seen.append([one.problem for one in evidence])
            return {}

    faults = Faults(silences=(Window(start_s=9.0, end_s=16.0),))
    run(structs.replace(SETUP, faults=faults), [Arrival(0.0, 10, 1), Arrival(22.0, 10, 1)], Watching())
    assert [bool(one[0]) for one in Watching.seen] == [False, True, True, False]


def test_posted_objectives_are_counted_against() -> None:
    class Posting(Watched):
        interval_s = 5.0
        counted: list[ObjectiveCounts | None] = []  # noqa: RUF012

        def round(self, evidence, now_s):  # type: ignore[no-untyped-def]
            self.counted += [one.evidence.objective_counts for one in evidence]
            update = LimitsUpdate(revision=1, limits=LimitsChange(), objectives=ObjectiveTimes(ttft_s=1.0, itl_s=0.005))
            return {one.pod: update for one in evidence}

    run(SETUP, [Arrival(float(at_s), 10, 20) for at_s in range(1, 14)], Posting())
    before, after = Posting.counted
    assert before is None
    assert after is not None and after.gaps is not None
    assert after.gaps.num > 0
    assert after.gaps.num_over == after.gaps.num  # a step takes 11 ms


def test_the_oracle_takes_the_best_of_the_grid() -> None:
    work = burst(0.0, 20, 2.0, 200, 10)
    tried = sweep(SETUP, work, [(8, 64), (8, 512), (64, 512)], seed=0, duration_s=2.0, num_processes=1)
    assert max(one.share_good for one in tried) == next(
        one.share_good for one in tried if (one.max_num_seqs, one.max_num_batched_tokens) == best(tried)
    )
    same = [
        Tried(max_num_seqs=n, max_num_batched_tokens=t, share_good=0.5) for n, t in ((64, 256), (32, 128), (8, 128))
    ]
    assert best(same) == (8, 128)


def fixed_world(seqs: int, tokens: int, max_bad: int | None = None) -> World:
    world = World(oracle.fixed(SETUP, (seqs, tokens)), burst(0.0, 40, 2.0, 16, 60), Static(), 1, max_bad)
    world.run()
    return world


def ended(world: World) -> list[tuple[float, float | None, float | None]]:
    return [(one.end_s, one.ttft_s, one.itl_p95_s) for one in world.outcomes()]


def test_a_limit_on_sequences_above_what_runs_makes_no_other_run() -> None:
    most = fixed_world(64, 256).most_running
    assert 8 < most < 63
    assert ended(fixed_world(64, 256)) == ended(fixed_world(most + 1, 256))
    assert ended(fixed_world(64, 256)) != ended(fixed_world(most // 2, 256))


def test_a_run_is_given_up_when_it_has_too_many_bad_requests_and_not_before() -> None:
    whole = fixed_world(1, 128)
    num_bad = sum(not SETUP.objectives.met_by(one.ttft_s, one.itl_p95_s) for one in whole.outcomes())
    kept, lost = fixed_world(1, 128, num_bad), fixed_world(1, 128, num_bad - 1)
    assert (kept.was_given_up, ended(kept)) == (False, ended(whole))
    assert lost.was_given_up
    early = fixed_world(1, 128, 25)
    assert early.was_given_up
    assert len(early.outcomes()) < 25  # what has waited too long for its first token is bad before it ends


def test_aimd_needs_an_objective_of_inter_token_latency() -> None:
    with pytest.raises(ConfigError, match="interTokenLatencyP95Milliseconds"):
        Aimd(structs.replace(TUNING, objectives=Objectives(ttft_p95_milliseconds=100)))
