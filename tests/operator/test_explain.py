"""flyball explain: from the record of a slow loop and from an LLMDeployment's status, in words and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from flyball_operator.cli import main
from flyball_operator.commands.explain import MAX_READ_BYTES, read_last
from flyball_operator.commands.explanation import Explanation, of_records, of_status, render
from flyball_operator.spec import Objectives
from flyball_operator.tuning.record import DecisionRecord, to_line
from operator_kit.deployment import Deployment

MADE: dict[str, Any] = {
    "time": "2026-01-01T10:00:00Z",
    "action": "try",
    "verdict": "tried",
    "reason": "InterTokenLatencyOver",
    "message": "max_num_batched_tokens 512 -> 358, max_num_seqs 8 -> 4: 20% took longer than 40 ms",
    "moves": [{"limit": "maxNumBatchedTokens", "from": 512, "to": 358}],
    "overPerMille": {"ttft": 4, "interTokenLatency": 200},
    "limits": {"maxNumSeqs": 64, "maxNumBatchedTokens": 358, "kvCachePercent": 80},
}
KEPT = MADE | {
    "time": "2026-01-01T10:02:00Z",
    "action": "promote",
    "verdict": "kept",
    "reason": "CanaryNotWorse",
    "message": "it did \x1b[31mno worse",
    "overPerMille": {"interTokenLatency": 3},
}


def recorded() -> list[DecisionRecord]:
    """What a slow loop records whose replica meets the objective once steps aim below 30 ms."""
    found = Deployment(lambda one: {"itl_over": 4000 if one.step_ms > 30 else 0}, num_replicas=1)
    found.minutes(5)
    return found.records


def deployment(**tuning: Any) -> dict[str, Any]:
    spec = {"mode": "Auto", "objectives": {"ttftP95Milliseconds": 1000, "interTokenLatencyP95Milliseconds": 40}}
    return {
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {"model": {"uri": "hf://org/name"}, "tuning": spec},
        "status": {"tuning": {"state": "Converged", "revision": 2, "decisions": [KEPT, MADE]} | tuning},
    }


def text(found: Explanation, *, width: int = 120, plain: bool = False) -> list[str]:
    console = Console(width=width)
    with console.capture() as printed:
        console.print(render(found, plain=plain))
    return [" ".join(line.split()) for line in printed.get().splitlines()]


def test_a_record_file_is_told_in_words(tmp_path: Path) -> None:
    records = recorded()
    (tmp_path / "decisions.jsonl").write_bytes(b"".join(map(to_line, records)))
    shown = text(of_records("chat", read_last(tmp_path / "decisions.jsonl")[0]))
    assert shown[0] == "chat tuning Auto, Converged, revision 2"
    (itl,) = [line for line in shown if line.startswith("inter-token latency")]
    assert itl.endswith("0 % over 40 ms") and "█" in itl and "▁" in itl
    assert any(line.startswith("step time target") and line.endswith("27.2 ms (27.2 ms to 34 ms)") for line in shown)
    told = [line.split(" ", 2)[2] for line in shown if line[:2] == "20" and "step time target" in line]
    assert told == [
        "Changed step time target none -> 34 ms at every replica",
        "Tried step time target 34 ms -> 27.2 ms at one replica",
        "Kept step time target 34 ms -> 27.2 ms and given to every replica",
    ]
    assert any("20.0% of 1000 requests by their p95 gap took longer" in line for line in shown)
    assert "Converged: the objectives are met and no limit needs to move." in shown


def test_holds_are_in_the_chart_and_not_in_the_list() -> None:
    found = of_records("chat", recorded())
    assert {one.verdict for one in found.decisions} == {"made", "tried", "kept", "settled", "held"}
    assert not any("Held" in line for line in text(found))


def test_a_status_is_told_in_words_oldest_first() -> None:
    shown = text(of_status(deployment()))
    assert shown[0] == "team/chat tuning Auto, Converged, revision 2"
    told = [line for line in shown if line.startswith("2026-01-01")]
    assert told == [
        "2026-01-01 10:00:00 Tried tokens a step 512 -> 358 at one replica",
        "2026-01-01 10:02:00 Kept tokens a step 512 -> 358 and given to every replica",
    ]
    assert any(line.endswith("(InterTokenLatencyOver): 20% took longer than 40 ms") for line in shown), "said once"
    assert any(line.startswith("TTFT") and line.endswith("0.4 % over 1000 ms") for line in shown)
    assert "\x1b" not in "".join(shown)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_into_the_terminal(width: int) -> None:
    console = Console(width=width)
    with console.capture() as printed:
        console.print(render(of_status(deployment())))
    assert max(map(len, printed.get().splitlines())) <= width


def test_without_unicode_it_is_drawn_in_ascii() -> None:
    assert all(line.isascii() for line in text(of_status(deployment()), plain=True))


def test_before_the_first_change_it_says_so() -> None:
    hold = {"time": "2026-01-01T10:00:00Z", "action": "hold", "reason": "FewSamples", "message": "3 of 100"}
    shown = text(of_status(deployment(state="Observing", decisions=[], lastDecision=hold)))
    assert "Nothing was changed yet." in shown and "2026-01-01 10:00:00 FewSamples: 3 of 100" in shown


def test_a_recommendation_is_told_as_what_auto_would_do() -> None:
    limits = MADE["limits"]
    shown = text(of_status(deployment(effective=limits, recommended=limits | {"kvCachePercent": 60}, decisions=[])))
    assert "Mode Auto would change KV cache 80 % -> 60 %." in shown


def test_where_tuning_is_off_it_says_so() -> None:
    plain = {"metadata": {"name": "chat", "namespace": "team"}, "spec": {"model": {"uri": "hf://org/name"}}}
    assert "spec.tuning.mode turns it on" in text(of_status(plain))[1]


def test_a_status_that_is_not_ours_is_as_good_as_none() -> None:
    assert "Nothing was changed yet." in text(of_status(deployment(state="Unheard")))


def test_one_objective_and_constant_limits_can_be_drawn() -> None:
    found = structs.replace(of_status(deployment()), objectives=Objectives(ttft_p95_milliseconds=1000))
    assert not any(line.startswith("inter-token") for line in text(found))


def test_the_command_reads_the_record_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "chat" / "logs"
    folder.mkdir(parents=True)
    (folder / "decisions.jsonl").write_bytes(b'{"version": 1}\n' + b"".join(map(to_line, recorded())) + b'{"cut')
    for words in (["--state-dir", str(tmp_path)], ["--log-dir", str(folder)]):
        assert main(["explain", "chat", *words, "-o", "json"]) == 0
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        assert "1 lines of another version" in printed.err
        assert (found["name"], found["state"], found["decisions"][0]["verdict"]) == ("chat", "Converged", "made")
        assert found["decisions"][0]["moves"] == [{"limit": "stepTimeTargetMilliseconds", "to": 34}]
        tried = next(one for one in found["decisions"] if one["verdict"] == "tried")
        assert tried["overPerMille"] == {"ttft": 0, "interTokenLatency": 200}


@pytest.mark.parametrize(
    ("content", "words"), [(None, "once tuning is on"), (b"", "no decision"), (b"{}\n", "no decision")]
)
def test_without_a_record_the_error_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "decisions.jsonl").write_bytes(content)
    assert main(["explain", "chat", "--log-dir", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_of_a_long_record_the_end_is_read(tmp_path: Path) -> None:
    lines = [to_line(one) for one in recorded()]
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"x" * MAX_READ_BYTES + b"\n" + b"".join(lines))
    found, num_unreadable = read_last(path)
    assert (len(found), num_unreadable) == (len(lines), 0)


def test_the_longest_chart_is_whole_in_80_characters() -> None:
    decisions = [MADE | {"limits": MADE["limits"] | {"maxNumBatchedTokens": n}} for n in range(179, 257)][-10:]
    console = Console(width=80)
    with console.capture() as printed:
        console.print(render(of_status(deployment(decisions=decisions * 4))))
    assert "…" not in printed.get() and "(247 to 256)" in printed.get()
