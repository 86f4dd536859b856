"""LocalRunner over real processes: replicas, probes, restarts, drain, rolling replacement, reconciling."""

import asyncio
import dataclasses
import io
import os
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from flyball_operator.errors import LocalError
from flyball_operator.local.control import Handover, HandoverAnswer, InstanceFolder, hand_over
from flyball_operator.local.replica import State
from flyball_operator.spec import LLMDeployment, manifest
from flyball_operator.tuning.record import from_line
from operator_kit.local import DEADLINE_S, Running, running


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(3 * DEADLINE_S):
            await test

    asyncio.run(within_deadline())


def pids(now: Running) -> set[int | None]:
    return {replica.pid for replica in now.runner.snapshot().replicas}


def test_replicas_start_serve_through_one_port_and_drain() -> None:
    async def scenario() -> None:
        async with running(2, replicas=2) as now:
            answers = [await now.complete() for _ in range(4)]
            assert {answer["pid"] for answer in answers} == pids(now)
            async with now.client.get(now.runner.url + "/readyz") as response:
                assert (response.status, (await response.json())["num_ready_replicas"]) == (200, 2)
            started = pids(now)
        for pid in started:
            assert pid is not None
            assert not Path(f"/proc/{pid}").exists()
        assert "exit code 0 (stopped cleanly)" in now.lines
        assert not now.folder.socket_path.exists()

    run(scenario())


def test_where_there_are_several_numa_nodes_each_replica_runs_on_one() -> None:
    def words(pid: int | None) -> list[str]:
        try:
            return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):  # it has not started yet, or ends just now
            return []

    def nodes(now: Running) -> list[str]:
        return sorted(word for pid in pids(now) for word in words(pid) if word.startswith("--numa-node"))

    async def scenario() -> None:
        async with running(3, replicas=3, numa_nodes=(0, 1)) as now:
            assert nodes(now) == ["--numa-node=0", "--numa-node=0", "--numa-node=1"]
            now.file.write(runtime={"extraArgs": ["--numa-node=1"]})  # somebody who says where
            await now.until(lambda _: nodes(now) == ["--numa-node=1"] * 3)
        async with running(1, replicas=1, numa_nodes=(0, 1)) as now:  # alone it has all of them
            assert nodes(now) == []
        async with running(2, replicas=2, numa_nodes=(0,)) as now:
            assert nodes(now) == []

    run(scenario())


def test_scaling_up_and_down_loses_no_request() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            now.file.write(replicas=3)
            await now.until_ready(3)
            assert "scaling 1 -> 3: spec.replicas changed" in now.lines
            streams = [asyncio.create_task(now.stream(tokens=30, gap_s=0.02)) for _ in range(6)]
            await now.until(lambda s: sum(replica.outstanding for replica in s.replicas) == 6)
            now.file.write(replicas=1)
            await now.until(lambda s: sum(replica.state is State.DRAINING for replica in s.replicas) == 2)
            for events in await asyncio.gather(*streams):
                assert events[-1] == "[DONE]"
                assert len(events) == 31
            snapshot = await now.until_ready(1)
            assert [replica.number for replica in snapshot.replicas] == [1]
            now.file.write(replicas=0)
            await now.until(lambda s: not s.replicas)
            async with now.post("/v1/completions") as response:
                assert response.status == 503
                assert "raise spec.replicas" in (await response.json())["error"]["message"]

    run(scenario())


def test_rolling_replacement_under_load_has_no_failure() -> None:
    async def scenario() -> None:
        async with running(2, replicas=2) as now:
            before, stop, answers = pids(now), asyncio.Event(), []

            async def client(stream: bool) -> None:
                while not stop.is_set():
                    if stream:
                        events = await now.stream(tokens=5, gap_s=0.005)
                        assert events[-1] == "[DONE]"
                    else:
                        answers.append(await now.complete(tokens=2, gap_s=0.005))

            clients = [asyncio.create_task(client(stream)) for stream in (True, False) * 3]
            now.file.write(runtime={"maxNumSeqs": 8})
            await now.until_line("their template changed (--max-num-seqs=256 -> --max-num-seqs=8)")
            await now.until(lambda s: s.num_ready == 2 == len(s.replicas) and all(r.current for r in s.replicas))
            stop.set()
            await asyncio.gather(*clients)
            assert not before & pids(now)
            assert len(answers) > 10

    run(scenario())


def test_a_replacement_that_never_gets_ready_leaves_the_old_replicas_serving() -> None:
    async def scenario() -> None:
        async with running(2, replicas=2) as now:
            before = pids(now)
            now.file.write(env={"FAKE_FAIL": "no such model: /nowhere"})
            await now.until(lambda s: any(replica.restarts >= 2 for replica in s.replicas))
            assert (await now.complete())["pid"] in before
            assert "failed to start: exit code 2 (configuration error): no such model: /nowhere" in now.lines
            del now.file.env["FAKE_FAIL"]
            now.file.write()
            await now.until_ready(2)
            assert pids(now) == before

    run(scenario())


def test_a_crash_is_restarted_with_growing_waits_and_says_why() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            (first,) = pids(now)
            async with now.post("/fake/exit") as response:
                assert response.status == 502
                assert (await response.json())["error"]["code"] == "replica_lost"
            await now.until(lambda s: any(r.state is State.READY and r.pid != first for r in s.replicas))
            assert "ended: exit code 3 (the engine died): the engine is gone; restart 1 in 0.05 s" in now.lines
            async with now.post("/fake/exit"):
                pass
            await now.until_line("restart 2 in 0.1 s")

    run(scenario())


@pytest.mark.slow
def test_a_hung_replica_is_ended_by_its_liveness_probe_and_started_again() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            (first,) = pids(now)
            async with now.post("/fake/hang") as response:
                assert response.status == 200
            await now.until_line("is stuck: /livez failed 2 times in a row, every 0.05 s: no answer in 0.5 s")
            await now.until(lambda s: any(r.state is State.READY and r.pid != first for r in s.replicas))
            assert "ended by signal 9" in now.lines

    run(scenario())


def test_an_unready_replica_gets_no_requests_and_is_not_restarted() -> None:
    async def scenario() -> None:
        async with running(2, replicas=2) as now:
            before = pids(now)
            async with now.post("/fake/unready"):
                pass
            snapshot = await now.until(lambda s: s.num_ready == 1)
            (unready,) = (r.pid for r in snapshot.replicas if r.state is State.UNREADY)
            assert unready not in {(await now.complete())["pid"] for _ in range(4)}
            assert pids(now) == before

    run(scenario())


def test_without_a_ready_replica_requests_get_503_with_retry_after_and_the_reason() -> None:
    async def scenario() -> None:
        async with running(env={"FAKE_START_S": "30"}) as now:
            await now.until(lambda s: len(s.replicas) == 1)
            async with now.post("/v1/chat/completions") as response:
                error = (await response.json())["error"]
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert (error["code"], error["param"]) == ("no_ready_replica", None)
                assert "replica 1 is starting" in error["message"]
            async with now.post("/v1/messages") as response:  # in Anthropic's shape
                body = await response.json()
                assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
            async with now.client.get(now.runner.url + "/readyz") as response:
                assert response.status == 503

    run(scenario())


def test_a_replica_that_dies_mid_stream_ends_it_with_an_error_event() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            stream = asyncio.create_task(now.stream(tokens=1000, gap_s=0.01))
            snapshot = await now.until(lambda s: s.replicas[0].outstanding == 1)
            await asyncio.sleep(0.1)
            os.kill(snapshot.replicas[0].pid or 0, signal.SIGKILL)
            events = await stream
            assert "replica_lost" in events[-1]
            assert "replica 1 was lost" in events[-1] and events[-1].startswith("event: error\ndata: ")
            assert '"token"' in events[0]

    run(scenario())


def test_requests_go_to_the_replica_with_the_fewest_outstanding() -> None:
    async def scenario() -> None:
        async with running(2, replicas=2) as now:
            long = asyncio.create_task(now.complete(tokens=1, gap_s=0.5))
            busy = await now.until(lambda s: any(replica.outstanding for replica in s.replicas))
            (taken,) = (replica.pid for replica in busy.replicas if replica.outstanding)
            others = {(await now.complete(tokens=0))["pid"] for _ in range(5)}
            assert others == pids(now) - {taken}
            assert (await long)["pid"] == taken
            at_once = await asyncio.gather(*(now.complete(tokens=1, gap_s=0.3) for _ in range(8)))
            assert max(answer["max_running"] for answer in at_once) == 4

    run(scenario())


def test_a_client_that_goes_away_frees_its_replica() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            async with now.post("/v1/completions", stream=True, tokens=10000, gap_s=0.01) as response:
                await response.content.readany()
                assert now.runner.snapshot().replicas[0].outstanding == 1
            await now.until(lambda s: s.replicas[0].outstanding == 0)

    run(scenario())


def test_bodies_and_headers_pass_through() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            for size in (0, 10, 3 << 20):
                headers = {"Authorization": "Bearer key", "Connection": "X-Hop", "X-Hop": "1"}
                async with now.client.post(
                    now.runner.url + "/echo", data=io.BytesIO(b"x" * size), headers=headers
                ) as response:
                    seen = await response.json()
                    assert (response.status, seen["length"]) == (200, size)
                    assert seen["headers"]["authorization"] == "Bearer key"
                    assert "x-hop" not in seen["headers"]
                    assert response.headers["X-Flyball-Replica"] == "1"
            async with now.client.get(URL(now.runner.url + "/nowhere?a=%2F", encoded=True)) as response:
                assert (response.status, await response.json()) == (404, {"path": "/nowhere?a=%2F"})

    run(scenario())


def test_a_malformed_change_keeps_what_runs_and_says_why() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            before = pids(now)
            for text, words in (
                ("replicas: [", "not valid YAML"),
                ("kind: Pod\n", "kind is 'Pod'"),
                ("made: 2024-13-45\n", "made is not a field"),
                ("made: " + "9" * 5000, "a number of 5000 characters"),
                ("made: " + "[" * 100_000, "levels deep"),
                ("made: \0", "control characters"),
            ):
                now.file.write_text(text)
                await now.until_line(words)
            now.file.write(replicas=-1)
            await now.until_line("spec.replicas is -1")
            now.file.write(replicas=1, model={"uri": "pvc://claim/llama"})
            await now.until_line("pvc:// needs a cluster")
            assert pids(now) == before
            assert "is not taken, what runs goes on" in now.lines
            await now.complete()

    run(scenario())


def test_a_fault_of_ours_while_a_manifest_is_taken_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(1) as now:
            monkeypatch.setattr("flyball_operator.local.runner.describe_changes", lambda *_: 1 / 0)
            now.file.write(replicas=2)
            await now.until_line("is not taken, what runs goes on: ZeroDivisionError, a fault of flyball-operator")
            await now.complete()

    run(scenario())


def test_a_fault_of_ours_with_a_replica_is_a_crash_of_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(1) as now:
            with monkeypatch.context() as patch:
                patch.setattr("flyball_operator.local.replica.Process.start", lambda *_: 1 / 0)
                now.file.write(replicas=2)
                await now.until_line("replica 2 failed in the operator, whose log has the traceback; restart 1")
                await now.complete()
            await now.until_ready(2)

    run(scenario())


@pytest.mark.slow
def test_decisions_that_cannot_be_recorded_are_told_once_and_once_when_they_can() -> None:
    async def scenario() -> None:
        tuning = {"mode": "Recommend", "objectives": {"interTokenLatencyP95Milliseconds": 40}, "intervalSeconds": 1}
        async with running(1, env={"FAKE_ITL_OVER": "4000"}) as now:
            in_the_way = now.folder.log_dir / "decisions.jsonl"
            in_the_way.mkdir()
            now.file.write(tuning=tuning)
            await now.until_line("decisions are not recorded in")
            assert "Is a directory" in now.lines
            await now.until(lambda _: now.runner._tuner._recording._num_failures > 1)
            in_the_way.rmdir()
            await now.until_line("are recorded in")
            assert now.lines.count("decisions are not recorded in") == 1
            await now.complete()
            for line in in_the_way.read_bytes().splitlines():
                from_line(line)

    run(scenario())


def test_reload_reads_an_unchanged_file_again() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            now.runner.reload()
            await now.until_line("was read again: nothing to change")

    run(scenario())


def test_a_second_invocation_hands_its_manifest_over() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            second = InstanceFolder(now.folder.path.parent, "chat")
            assert not second.acquire()
            text = now.file.path.read_text()
            other = now.file.path.with_name("other.yaml")
            other.write_text(text.replace("replicas: 1", "replicas: 2"))
            answer = await hand_over(second, Handover(manifest=other.read_text(), source=str(other)))
            assert answer.plan == ("scaling 1 -> 2: spec.replicas changed",)
            assert answer.url == now.runner.url
            await now.until_ready(2)
            refused = await hand_over(second, Handover(manifest="kind: Pod", source="/x.yaml"))
            assert "kind is 'Pod'" in (refused.error or "")
            renamed = await hand_over(
                second, Handover(manifest=text.replace("name: chat", "name: code"), source="/x.yaml")
            )
            assert "no deployment named 'chat', only code" in (renamed.error or "")
            assert now.runner.snapshot().wanted == 2

    run(scenario())


class HeldParser:
    """Takes the place of the manifests' parser: each call waits for ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._parse = manifest.parse
        monkeypatch.setattr(manifest, "parse", self)

    def __call__(self, *args: Any, **kwargs: Any) -> list[LLMDeployment]:
        self.begun.set()
        assert threading.current_thread() is not threading.main_thread(), "the event loop waits for the parser"
        assert self.go.wait(3 * DEADLINE_S)
        return self._parse(*args, **kwargs)


def hand_over_replicas(now: Running, count: int) -> Coroutine[Any, Any, HandoverAnswer]:
    text = now.file.path.read_text().replace("replicas: 1", f"replicas: {count}")
    folder = InstanceFolder(now.folder.path.parent, "chat")
    return hand_over(folder, Handover(manifest=text, source=str(now.file.path)))


def test_requests_are_answered_while_a_manifest_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(1) as now:
            parser = HeldParser(monkeypatch)
            now.file.write(replicas=2)
            await now.until(lambda _: parser.begun.is_set())
            await now.complete()
            assert now.runner.snapshot().wanted == 1
            parser.go.set()
            await now.until_ready(2)

    run(scenario())


def test_manifests_are_applied_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(1) as now:
            parser = HeldParser(monkeypatch)
            handing = asyncio.create_task(hand_over_replicas(now, 2))
            await now.until(lambda _: parser.begun.is_set())
            now.file.write(replicas=3)
            parser.go.set()
            assert (await handing).plan == ("scaling 1 -> 2: spec.replicas changed",)
            await now.until_ready(3)
            assert "scaling 2 -> 3: spec.replicas changed" in now.lines

    run(scenario())


def test_a_manifest_that_is_parsed_when_the_instance_stops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(1) as now:
            parser = HeldParser(monkeypatch)
            handing = asyncio.create_task(hand_over_replicas(now, 2))
            await now.until(lambda _: parser.begun.is_set())
            draining = asyncio.create_task(now.runner.drain())
            await asyncio.sleep(0)
            parser.go.set()
            assert "the instance is stopping" in ((await handing).error or "")
            await draining

    run(scenario())


def test_an_instance_that_holds_the_lock_and_does_not_answer_is_an_error(tmp_path: Path) -> None:
    first, second = InstanceFolder(tmp_path, "chat"), InstanceFolder(tmp_path, "chat")
    assert first.acquire()
    try:
        assert not second.acquire()
        with pytest.raises(LocalError, match="does not answer"):
            asyncio.run(hand_over(second, Handover(manifest="", source="/x.yaml")))
    finally:
        first.release()
    assert second.acquire()
    second.release()


def test_a_taken_port_is_named() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            port = int(now.runner.url.rpartition(":")[2])
            with pytest.raises(LocalError, match=f"cannot listen on 127.0.0.1 port {port}: .*--port"):
                async with running(port=port):
                    raise AssertionError("unreachable")

    run(scenario())


def test_a_drain_longer_than_the_grace_period_ends_in_a_kill_that_is_reported() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            async with now.post("/fake/hang"):
                pass
            # The liveness probe needs a second to notice; the replica is asked to drain before that.
            replica = now.runner._fleet.replicas[0]
            replica.template = dataclasses.replace(replica.template, grace_s=0.1)
            assert await now.runner.drain() is False
            assert "was killed at the end of its grace period" in now.lines

    run(scenario())


def test_drain_answers_new_requests_with_503_while_running_ones_finish() -> None:
    async def scenario() -> None:
        async with running(1) as now:
            async with now.post("/v1/completions", stream=True, tokens=40, gap_s=0.02) as stream:
                await stream.content.readany()  # so the replica has taken it
                draining = asyncio.create_task(now.runner.drain())
                await now.until(lambda s: s.replicas[0].state is State.DRAINING)
                async with now.post("/v1/completions") as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (503, "draining")
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            assert await draining is True
            assert "takes no more requests" not in now.lines  # it was told to; a red readiness probe is no news

    run(scenario())


def test_tuning_changes_the_limits_of_every_replica_and_records_why() -> None:
    async def scenario() -> None:
        tuning = {
            "mode": "Auto",
            "objectives": {"interTokenLatencyP95Milliseconds": 40},
            "intervalSeconds": 1,
        }
        async with running(2, replicas=2, tuning=tuning, env={"FAKE_ITL_OVER": "4000"}, evidence_period_s=0.05) as now:

            def in_force(snapshot: Any) -> list[float | None]:
                read = [replica.evidence.evidence for replica in snapshot.replicas if replica.evidence]
                return [evidence.target.step_time_target_ms for evidence in read if evidence]

            await now.until(lambda s: in_force(s) == [34.0, 34.0])
            assert "tuning, revision 1 (ObjectivesSet): step_time_target_ms none -> 34 ms" in now.lines
            now.file.write(replicas=3)
            await now.until(lambda s: in_force(s) == [34.0, 34.0, 34.0])  # a new replica gets the limits in force
            records = [from_line(line) for line in (now.folder.log_dir / "decisions.jsonl").read_bytes().splitlines()]
            assert [record.replay() for record in records] == [record.decision for record in records]
            now.file.write(tuning={"mode": "Disabled", "intervalSeconds": 1})
            await now.until(lambda s: s.decision is None and in_force(s) == [None] * 3)

    run(scenario())


def test_limits_of_the_spec_move_running_replicas() -> None:
    async def scenario() -> None:
        async with running(2, replicas=2, tuning={"intervalSeconds": 1}, evidence_period_s=0.05) as now:

            def in_force(snapshot: Any) -> list[int]:
                read = [replica.evidence.evidence for replica in snapshot.replicas if replica.evidence]
                return [evidence.target.max_num_seqs for evidence in read if evidence]

            before = pids(now)
            now.file.write(tuning={"intervalSeconds": 1, "limits": {"maxNumSeqs": 3}})
            await now.until(lambda s: in_force(s) == [3, 3])
            await now.until_line("limits, revision 1: max_num_seqs ")
            assert pids(now) == before, "none was restarted"

    run(scenario())


def test_recommendations_change_nothing() -> None:
    async def scenario() -> None:
        tuning = {"mode": "Recommend", "objectives": {"interTokenLatencyP95Milliseconds": 40}, "intervalSeconds": 1}
        async with running(1, tuning=tuning, env={"FAKE_ITL_OVER": "4000"}, evidence_period_s=0.05) as now:
            await now.until_line("tuning recommends (ObjectivesSet): step_time_target_ms none -> 34 ms")
            evidence = now.runner.snapshot().replicas[0].evidence
            assert evidence is not None
            assert evidence.evidence is not None
            assert evidence.evidence.target.step_time_target_ms is None

    run(scenario())
