"""Parts of local mode that need no process."""

import asyncio
import dataclasses
import errno
import io
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs
from rich.console import Console

from flyball_operator.errors import LocalError, SpecError
from flyball_operator.local.changes import WatchedFile
from flyball_operator.local.control import InstanceFolder
from flyball_operator.local.fleet import AcceleratorPool, NumaNodes, numa_nodes, visible_devices
from flyball_operator.local.local_tuner import LocalTuner, append_line
from flyball_operator.local.process import Probe, Prober, explain_exit
from flyball_operator.local.replica import CrashBackoff, State
from flyball_operator.local.reports import Event, Events, Trouble, follow_logs
from flyball_operator.local.runner import select
from flyball_operator.local.snapshot import ReplicaSnapshot, Snapshot, render
from flyball_operator.local.template import ProcessTemplate, local_deployment, process_template
from flyball_operator.spec import Tuning, manifest
from flyball_operator.tuning.admin import Target
from operator_kit.evidence import LIMITS, make_evidence, pods

TEXT = """
apiVersion: flyball.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {uri: "hf://org/name"}
"""


def template(base: Path = Path("/srv"), **spec: Any) -> ProcessTemplate:
    document = manifest.read_documents(TEXT, "chat.yaml")[0]
    document["spec"] |= spec
    deployment = manifest.parse_document(document, source="chat.yaml", base=base)
    return process_template(local_deployment(deployment), ("/opt/flyball",))


def containers(*given: dict[str, Any]) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": list(given)}}}


def test_the_containers_command_runs_here_on_other_addresses() -> None:
    argv = template().argv_for(4001, 4002)
    assert argv[:3] == ["/opt/flyball", "serve", "org/name"]
    assert {
        "--host=127.0.0.1",
        "--port=4001",
        "--admin-host=127.0.0.1",
        "--admin-port=4002",
        "--max-num-seqs=256",
    } <= set(argv)
    assert not {"--port=8000", "--host=0.0.0.0"} & set(argv)


def test_paths_of_the_pod_stay_in_the_pod_and_other_variables_come_along() -> None:
    assert template(runtime={"env": [{"name": "A", "value": "1"}]}).env == {"A": "1"}


def test_the_pre_stop_sleep_is_not_waited_for() -> None:
    assert template(rollout={"drain": {"preStopSeconds": 30, "timeoutSeconds": 20}}).grace_s == 30


def test_the_digest_follows_the_pod_and_nothing_else() -> None:
    assert template().digest == template(replicas=3, tuning={"minSamples": 7}).digest
    assert template().digest != template(runtime={"maxNumSeqs": 7}).digest


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"uri": "pvc://claim/x"}}, "pvc:// needs a cluster; on this machine use file:"),
        ({"model": {"uri": "oci://image:1"}}, "oci:// needs a cluster"),
        ({"model": {"uri": "file:nowhere"}}, "/srv/nowhere is not a folder"),
        ({"accelerator": {"resourceName": "amd.com/gpu"}}, "amd.com/gpu; local mode can hand out nvidia.com/gpu only"),
        ({"runtime": {"envFrom": [{"secretRef": {"name": "s"}}]}}, "envFrom names cluster objects; give the values"),
        (
            {"model": {"uri": "hf://a/b", "secretRef": {"name": "s", "key": "k"}}},
            "env HF_TOKEN comes from a cluster object",
        ),
        ({"runtime": {"apiKeysSecretRef": {"name": "s"}}}, "apiKeysSecretRef names a Secret, .* FLYBALL_API_KEY"),
        (containers({"name": "proxy"}), "a container 'proxy'; local mode runs the runtime alone"),
        (containers({"name": "runtime", "command": ["sh"]}), "changes the runtime's command or args"),
        (containers({"name": "runtime", "args": None}), "changes the runtime's command or args"),
        (containers({"name": "runtime", "args": ["serve", "other"]}), "changes the runtime's command or args"),
        (containers({"name": "runtime", "startupProbe": {"httpGet": None}}), "makes the startupProbe no httpGet probe"),
        (
            containers({"name": "runtime", "startupProbe": {"periodSeconds": "soon"}}),
            "a pod that cannot be read: Expected `float`, got `str` .*startupProbe.periodSeconds",
        ),
        (
            containers({"name": "runtime", "startupProbe": {"timeoutSeconds": None}}),
            "cannot be read: .*`timeoutSeconds`",
        ),
        (containers({"name": "runtime", "livenessProbe": {"periodSeconds": 0}}), "livenessProbe.periodSeconds"),
        (containers({"name": "runtime", "args": [3]}), "cannot be read: .*args"),
        (containers({"name": "runtime", "env": [{"name": "A=B"}]}), "cannot be read: .*name"),
        (containers({"name": "runtime", "resources": {"limits": {"nvidia.com/gpu": "1Gi"}}}), "wants '1Gi' of nvidia"),
        (
            {"podTemplate": {"spec": {"terminationGracePeriodSeconds": {}}}},
            "cannot be read: .*terminationGracePeriodSeconds",
        ),
        (containers({"name": "runtime", "livenessProbe": None}), "makes the livenessProbe no httpGet probe"),
    ],
)
def test_what_only_a_cluster_has_is_refused(spec: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(LocalError, match=words):
        template(**spec)


def test_the_hubs_token_may_come_from_this_machines_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = template(model={"uri": "hf://a/b", "secretRef": {"name": "s"}})
    assert "HF_TOKEN" not in found.env, "replicas inherit the environment"


def test_variables_and_probe_times_of_a_pod_template_count_here_too() -> None:
    runtime = {"name": "runtime", "env": [{"name": "A", "value": "b"}], "readinessProbe": {"periodSeconds": 7}}
    found = template(**containers(runtime), model={"uri": "hf://a/b", "cache": {"mode": "Claim", "claimName": "mine"}})
    assert found.env == {"A": "b"}, "paths inside the pod, a claim's too, are not for this machine"
    assert found.readiness.period_s == 7


def test_what_a_pod_template_removes_is_missed_here_as_little_as_on_a_cluster() -> None:
    removed = containers({"name": "runtime", "env": None, "volumeMounts": None, "resources": None})
    removed["podTemplate"]["spec"]["terminationGracePeriodSeconds"] = None
    found = template(**removed, rollout={"drain": {"preStopSeconds": 0}})
    assert (found.env, found.grace_s, found.num_accelerators) == ({}, 30, 0)


def test_a_model_folder_is_found_beside_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert str(tmp_path / "model") in template(tmp_path, model={"uri": "file:model"}).argv


def test_backoff_doubles_to_its_cap_and_forgets_after_a_stable_run() -> None:
    backoff = CrashBackoff(first_s=1, most_s=8, stable_s=60)
    assert [backoff.after_crash(5) for _ in range(5)] == [1, 2, 4, 8, 8]
    assert [backoff.after_crash(60), backoff.after_crash(5)] == [1, 2]


def test_each_replica_has_its_accelerators_for_itself() -> None:
    pool = AcceleratorPool(("0", "1", "2"))
    assert (pool.room(1), pool.room(2), pool.room(0)) == (3, 1, None)
    assert pool.take(1, 2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert pool.take(2, 1) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert pool.room(1) == 0
    pool.give_back(1)
    assert pool.take(3, 1) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert pool.take(4, 0) == {}


def test_visible_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ("0", "2", "10")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-a"}, tmp_path) == ("3", "GPU-a")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_replicas_take_numa_nodes_in_turns() -> None:
    nodes = NumaNodes((0, 2))
    assert [nodes.take(number) for number in (1, 2, 3)] == [0, 2, 0]
    nodes.give_back(1)
    nodes.give_back(3)
    assert [nodes.take(number) for number in (4, 5)] == [0, 0]
    assert NumaNodes((1,)).take(1) is None
    assert NumaNodes(()).take(1) is None


def test_numa_nodes_are_those_of_the_cores_that_may_be_used(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    for core in (*mine, max(mine) + 1):
        folder = tmp_path / f"devices/system/cpu/cpu{core}"
        (folder / ("node3" if core == mine[0] else "node10" if core in mine else "node4")).mkdir(parents=True)
        (folder / "topology").mkdir()
    assert numa_nodes(tmp_path) == ((3, 10) if len(mine) > 1 else (3,))
    assert numa_nodes(tmp_path / "no such folder") == ()


def test_trouble_is_told_once_and_once_more_when_it_is_over(tmp_path: Path) -> None:
    said: list[str] = []
    trouble = Trouble(said.append, "nothing is written", lambda count: f"written again, {count} are missing")
    for path in (tmp_path / "no" / "a", tmp_path / "no" / "b", tmp_path / "a", tmp_path / "b"):
        with trouble.tolerated():
            path.touch()
    missing = f"[Errno 2] No such file or directory: '{tmp_path}/no/a'"
    assert said == [f"nothing is written: {missing}; everything else goes on", "written again, 2 are missing"]


def test_a_line_that_does_not_fit_on_the_disk_is_not_written_in_part() -> None:
    class Short(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:3])

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "decisions.jsonl"
        append_line(path, b"first\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "open", lambda self, mode, buffering: Short(self, "ab"))
            with pytest.raises(OSError, match="No space left"):
                append_line(path, b"second\n")
        assert path.read_bytes() == b"first\n"


def test_lines_of_logs_are_shown_without_control_characters(tmp_path: Path) -> None:
    async def follow() -> None:
        shown: list[str] = []
        following = asyncio.create_task(follow_logs(tmp_path, lambda _, line: shown.append(line), lambda _: None))
        await asyncio.sleep(0)
        (tmp_path / "replica-1.log").write_bytes(b"\x1b[31mred\x07\n" + b"x" * 9000 + b"\n")
        async with asyncio.timeout(20):
            while len(shown) < 2:
                await asyncio.sleep(0.01)
        following.cancel()
        assert shown[0] == r"\x1b[31mred\x07"
        assert len(shown[1]) < 5000

    asyncio.run(follow())


def test_a_probe_without_a_file_handle_says_nothing_about_the_replica() -> None:
    class Session:
        def __init__(self) -> None:
            self.answers = [OSError(errno.EMFILE, "Too many open files")] * 3

        @asynccontextmanager
        async def get(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            if self.answers:
                raise self.answers.pop()
            yield SimpleNamespace(status=200)

    probe = Probe(path="/livez", period_s=0.01, timeout_s=1.0, failure_threshold=1)
    prober = Prober(cast(Any, Session()), "http://127.0.0.1:1")
    assert asyncio.run(prober.ask(probe)) is None


def test_a_new_replica_is_tuned_at_once(tmp_path: Path) -> None:
    """The interval is an hour, so only the replica that becomes ready can bring the second round."""
    replica = SimpleNamespace(name="chat-0", admin_url="http://127.0.0.1:1", ready=False)
    rounds: list[list[Target]] = []
    second = asyncio.Event()

    async def gather(targets: list[Target]) -> list[Any]:
        rounds.append(targets)
        replica.ready = True
        if len(rounds) == 2:
            second.set()
        return []

    async def post_all(updates: dict[Target, Any]) -> list[Any]:
        return []

    async def tune() -> None:
        tuner = LocalTuner(
            "chat",
            Tuning(mode="Auto", interval_seconds=3600, cooldown_seconds=60, min_samples=100, max_step_percent=25),
            cast(Any, SimpleNamespace(replicas=[replica])),
            cast(Any, SimpleNamespace(gather=gather, post_all=post_all)),
            record_path=tmp_path / "decisions.jsonl",
            evidence_period_s=None,
            report=lambda text: None,
        )
        running = asyncio.create_task(tuner.run())
        await asyncio.wait_for(second.wait(), 60)
        running.cancel()

    asyncio.run(tune())
    assert [[one.name for one in targets] for targets in rounds] == [[], ["chat-0"]]


def test_a_file_has_changed_when_its_content_has(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    file = WatchedFile(path)
    assert not file.changed()
    path.touch()
    assert not file.changed()
    path.write_text("two")
    assert [file.changed(), file.changed()] == [True, False]
    path.unlink()
    assert not file.changed()
    path.write_text("three")
    assert file.changed()


def test_a_file_whose_content_is_known_has_changed_when_it_holds_something_else(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    assert not WatchedFile(path, b"one").changed()
    assert WatchedFile(path, b"two").changed()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "stopped cleanly"),
        (2, "configuration error"),
        (4, "drain deadline"),
        (9, "exit code 9"),
        (-9, "signal 9 (Killed)"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert words in explain_exit(code)


def test_one_of_several_deployments_is_chosen_by_name() -> None:
    both = manifest.parse(TEXT + "---" + TEXT.replace("chat", "code"), source="x", base=Path("/srv"))
    assert select(both, "code").name == "code"
    with pytest.raises(SpecError, match=r"2 deployments \(chat, code\); choose one with --name"):
        select(both, None)
    with pytest.raises(SpecError, match="no deployment named 'cat', only chat, code"):
        select(both, "cat")


def test_a_state_folder_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"107 bytes .* shorter --state-dir"):
        InstanceFolder(tmp_path / ("x" * 100), "chat").acquire()


def test_a_state_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="another --state-dir"):
        InstanceFolder(tmp_path / "file", "c").acquire()


def test_the_table_shows_states_latency_and_limits_on_their_way() -> None:
    evidence = make_evidence(effective=structs.replace(LIMITS, max_num_seqs=70), revision=41)
    replica = ReplicaSnapshot(
        number=1,
        state=State.READY,
        in_state_s=12.0,
        message="ready",
        pid=1,
        port=4001,
        outstanding=3,
        served=9,
        restarts=0,
        current=True,
        evidence=pods(evidence)[0],
    )
    starting = dataclasses.replace(replica, number=2, state=State.STARTING, evidence=None)
    snapshot = Snapshot(
        name="chat",
        url="http://127.0.0.1:8080",
        model="hf://a/b",
        wanted=2,
        replicas=(replica, starting),
        decision=None,
        events=(Event(0.0, "replica 1 ready in 3.2 s"),),
    )
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render(snapshot))
    text = console.export_text()
    for word in (
        "1/2 ready",
        "ready 12s",
        "starting 12s",
        "64/70",
        "512",
        "80%",
        "50%",
        "41",
        "replica 1 ready in 3.2 s",
    ):
        assert word in text


def test_events_hold_nothing_that_a_terminal_obeys() -> None:
    said: list[Event] = []
    Events(said.append)("replica 1 ended: \x1b[2J\x07 at once\nsecond line")
    assert [event.text for event in said] == ["replica 1 ended: \\x1b[2J\\x07 at once\nsecond line"]
