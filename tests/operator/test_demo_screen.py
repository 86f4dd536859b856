"""The live picture of examples/demo.py fits the terminal that it is drawn on."""

import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from flyball_operator.local.replica import State
from flyball_operator.local.reports import Event
from flyball_operator.local.snapshot import ReplicaSnapshot, Snapshot
from operator_kit.evidence import make_evidence, pods

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
REASON = "tuning, revision 7 (InterTokenLatencyOver): max_num_batched_tokens 256 -> 179: " + "because " * 20 + "END"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("demo_under_test", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def snapshot(num_events: int) -> Snapshot:
    (evidence,) = pods(make_evidence())
    replicas = tuple(
        ReplicaSnapshot(number, State.READY, 20.0, "", 1, 8000, 0, 0, 0, True, evidence) for number in (1, 2)
    )
    events = (*(Event(0.0, f"event {number}") for number in range(num_events - 1)), Event(0.0, REASON))
    return Snapshot("demo", "http://127.0.0.1:40000", "demo", 2, replicas, None, events)


def lines(demo: ModuleType, size: tuple[int, int], num_events: int) -> list[str]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=size[0], height=size[1], color_system=None)
    tally = demo.Tally()
    for number in range(3):
        words = " ".join(f"word{index}" for index in range(150))
        tally.answers.append(demo.Answer(f"question {number}", f"{words} last{number}", done=number == 2))
    picture = demo.Screen(console, operator=None, tally=tally)
    picture.phase, picture.snapshot = "3/5  a phase", snapshot(num_events)
    console.print(picture._picture())
    return screen.getvalue().splitlines()


@pytest.mark.parametrize(
    ("size", "num_events", "num_answers"), [((80, 24), 3, 2), ((80, 24), 8, 1), ((120, 40), 5, 3), ((60, 16), 8, 1)]
)
def test_the_picture_fits(demo: ModuleType, size: tuple[int, int], num_events: int, num_answers: int) -> None:
    drawn = lines(demo, size, num_events)
    assert len(drawn) < size[1]
    assert max(map(len, drawn)) <= size[0]
    text = "\n".join(drawn)
    assert text.count("question") == num_answers
    assert "last2" in text and "END" in text, "the newest is what must be seen"


def test_gaps_are_counted_against_the_objective_in_force(demo: ModuleType) -> None:
    known = snapshot(1)
    counts = known.replicas[0].evidence.evidence.objective_counts
    num = 2 * counts.gaps.num
    assert demo.gaps_within(known, 40) == (num, num - 2 * counts.gaps.num_over)
    assert demo.gaps_within(known, 41) == demo.gaps_within(None, 40) == (0, 0)


def test_a_phase_is_of_what_the_clients_saw_in_it(demo: ModuleType) -> None:
    tally = demo.Tally()
    tally.gaps_s += [0.5] * 20
    tally.begin()
    for name, gap_s in (("calm", 0.006), ("busy", 0.030), ("paced", 0.010)):
        tally.gaps_s += [gap_s] * 20
        tally.ttft_s += [10 * gap_s] * 20
        tally.end(name)
    calm, busy, paced = demo.story(tally.phases)
    assert calm.startswith(
        "  calm: 6.0 ms between tokens, 60 ms to the first one (p95, at the clients). A step computes"
    )
    assert "30.0 ms" in busy and "long prompts" in busy
    assert "10.0 ms" in paced and "Tuning limits" in paced
