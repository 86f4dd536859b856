"""`flyball status` and `flyball logs` of a cluster: what they ask of an API server, and what they make of its answers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flyball_cli import main
from flyball_operator.cluster.api_server import ClusterError, NotFound
from flyball_operator.cluster.client import Client
from flyball_operator.cluster.connection import Connection, Credentials
from flyball_operator.cluster.monitoring import Metrics
from flyball_operator.local.reports import find_last_lines

GROUP = "/apis/flyball.dev/v1alpha1/namespaces"
CONDITION = {"type": "Ready", "status": "False", "reason": "CrashLoop", "message": "pod chat-b: \x1b[31mbad\nnews"}
LIMITS = {"maxNumSeqs": 64, "maxNumBatchedTokens": 512, "kvCachePercent": 80}
DRAINING = {"name": "chat-a", "revision": 4, "target": LIMITS, "effective": LIMITS | {"maxNumSeqs": 70}}
LAST = {"time": "2026-01-01T00:00:00Z", "action": "change", "reason": "TTFTOver", "message": "prompts wait"}


def deployment(namespace: str, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "flyball.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": namespace},
        "spec": {"model": {"uri": "hf://org/name"}, "replicas": 2},
        "status": {"readyReplicas": 1, "url": "http://chat.team.svc:8000", "conditions": [CONDITION], **status},
    }


def pod(name: str, *, ready: bool) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": 2, "message": "no such model"}}
    container = {"name": "runtime", "ready": ready, "started": ready, "restartCount": 0 if ready else 3}
    return {
        "metadata": {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"},
        "spec": {"nodeName": "node-1"},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [container | ({} if ready else {"lastState": ended})],
        },
    }


class ApiServer:
    """Has a deployment `chat` in two namespaces, and two pods. Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.queries: list[dict[str, str]] = []
        tuning = {"state": "Converged", "revision": 4, "target": LIMITS, "replicas": [DRAINING], "lastDecision": LAST}
        self.deployments = {name: deployment(name, tuning=tuning) for name in ("team", "default")}
        self.pods = [pod("chat-b", ready=False), pod("chat-a", ready=True)]
        self.tables = [table("team"), table("default")]
        self.logs: dict[str, bytes] = {"chat-a": b"one\nt\x1b[2Jwo\nlast", "chat-b": b"three\n"}

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, request.path))
        self.queries.append(dict(request.query))
        namespace, *rest = request.path.partition("/namespaces/")[2].split("/")
        if request.path.endswith("llmdeployments"):
            return self.list(request, namespace)
        match rest:
            case ["llmdeployments", "chat"] if namespace in self.deployments:
                return web.json_response(self.deployments[namespace])
            case ["pods"]:
                return web.json_response({"items": self.pods, "metadata": {"resourceVersion": "1"}})
            case ["pods", name, "log"] if name in self.logs:
                return web.Response(body=self.logs[name])
        message = {"reason": "NotFound", "message": f"{request.path} is not here"}
        return web.json_response(message, status=404)

    def list(self, request: web.Request, namespace: str) -> web.Response:
        """The tables are two pages."""
        if "as=Table" not in request.headers["Accept"]:
            items = [one for name, one in self.deployments.items() if namespace in ("", name)]
            return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}})
        page = int(request.query.get("continue", "0"))
        rest = {"continue": "1"} if page + 1 < len(self.tables) else {}
        return web.json_response({**self.tables[page], "metadata": {"resourceVersion": "1", **rest}})


def table(namespace: str) -> dict[str, Any]:
    """What an API server makes of a deployment for `kubectl get`."""
    columns = [("Name", 0), ("Ready", 0), ("Status", 0), ("URL", 1)]
    cells = ["chat", "1/2", "Crash\x1b[31mLoop", None]
    return {
        "kind": "Table",
        "columnDefinitions": [{"name": name, "type": "string", "priority": priority} for name, priority in columns],
        "rows": [{"cells": cells, "object": {"metadata": {"name": "chat", "namespace": namespace}}}],
    }


def kubeconfig(folder: Path, server: str) -> Path:
    context = {"cluster": "c", "user": "u"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [
            {"name": "plain", "context": context},
            {"name": "team", "context": context | {"namespace": "team"}},
        ],
        "current-context": "plain",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


Run = Callable[..., int]


@pytest.fixture
def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
def run(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run commands against the API server, one after the other; returns the last one's exit code."""

    def run(*commands: list[str]) -> int:
        return asyncio.run(scenario(commands))

    async def scenario(commands: tuple[list[str], ...]) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, f"http://127.0.0.1:{runner.addresses[0][1]}")))
        try:
            return [await asyncio.to_thread(main, words) for words in commands][-1]
        finally:
            await runner.cleanup()

    return run


def test_status_shows_conditions_tuning_and_pods(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "chat", "-n", "team"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [" ".join(line.split()) for line in lines]
    assert shown[0] == "team/chat http://chat.team.svc:8000 1/2 ready"
    assert "Tuning Converged, revision 4" in shown
    assert "target: 64 sequences, 512 tokens a step, 80% of the KV cache" in shown
    assert "chat-a: 64/70 seqs, 512 tokens, 80% KV (revision 4)" in shown
    assert "2026-01-01T00:00:00Z change (TTFTOver): prompts wait" in shown
    assert "chat-a Ready 0 node-1" in shown
    assert "chat-b CrashLoop 3 node-1" in shown
    assert "\x1b[31m" not in "".join(lines)
    assert any("Ready False CrashLoop pod chat-b:" in line for line in shown)


def test_explain_tells_what_tuning_did(run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    made = LAST | {"verdict": "made", "moves": [{"limit": "maxNumSeqs", "from": 48, "to": 64}]}
    server.deployments["team"]["status"]["tuning"]["decisions"] = [made]
    assert run(["explain", "chat", "-n", "team"]) == 0
    assert "Changed running sequences 48 -> 64 at every replica" in capsys.readouterr().out
    assert run(["explain", "chat", "-n", "team", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"][0]["moves"][0]["to"] == 64
    assert {method for method, _ in server.asked} == {"GET"}


def test_status_only_reads(run: Run, server: ApiServer) -> None:
    run(["status", "chat", "-n", "team"], ["logs", "chat", "-n", "team"])
    assert {method for method, _ in server.asked} == {"GET"}


def test_status_as_json_is_what_the_api_server_has(
    run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "chat", "-n", "team", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["deployment"] == server.deployments["team"]
    assert [one["metadata"]["name"] for one in found["pods"]] == ["chat-a", "chat-b"]


@pytest.mark.parametrize(("context", "namespace"), [("team", "team"), ("plain", "default")])
def test_without_a_namespace_the_contexts_counts(run: Run, server: ApiServer, context: str, namespace: str) -> None:
    assert run(["status", "chat", "--context", context]) == 0
    assert server.asked[0] == ("GET", f"{GROUP}/{namespace}/llmdeployments/chat")


@pytest.mark.parametrize(("options", "namespaces"), [(["-n", "team"], False), (["-A"], True)])
def test_status_without_a_name_lists_what_kubectl_get_prints(
    options: list[str], namespaces: bool, run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", *options]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [
        ["Namespace", "Name", "Ready", "Status"],
        *([name, "chat", "1/2", r"Crash\x1b[31mLoop"] for name in ("team", "default")),
    ]
    assert words == [row if namespaces else row[1:] for row in rows]
    path = "/apis/flyball.dev/v1alpha1/llmdeployments" if namespaces else f"{GROUP}/team/llmdeployments"
    assert server.asked == [("GET", path)] * 2


def test_status_without_a_name_as_json_is_a_list(
    run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--context", "team", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [server.deployments["team"]]


def test_a_namespace_without_deployments_is_no_error(
    run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.tables = [table("team") | {"rows": []}]
    assert run(["status", "-n", "team"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, "no deployments found" in printed.err) == ("", True)


@pytest.mark.parametrize("words", [["chat", "-A"], ["-A", "-n", "team"]])
def test_all_namespaces_excludes_a_name_and_a_namespace(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *words]) == 2
    assert "--all-namespaces lists all deployments" in capsys.readouterr().err


def test_a_deployment_or_context_that_is_not_there_is_named(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "chat", "-n", "nowhere"]) == 2
    assert "get llmdeployments.flyball.dev nowhere/chat: 404 NotFound" in capsys.readouterr().err
    assert run(["status", "chat", "--context", "nope"]) == 2
    assert "nope" in capsys.readouterr().err


def test_a_place_is_here_or_on_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "chat", "-n", "team", "--state-dir", str(tmp_path)]) == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_logs_are_those_of_each_pods_runtime(run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "chat", "-n", "team", "--tail", "7"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[chat-a] one",
        "[chat-a] t\\x1b[2Jwo",
        "[chat-a] last",
        "[chat-b] three",
    ]
    wanted = {"container": "runtime", "tailLines": "7", "follow": "false", "previous": "false"}
    assert server.queries[-2:] == [wanted, wanted]


def test_logs_are_followed_in_all_pods_at_once(run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "chat", "-n", "team", "--follow"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert {query.get("follow") for query in server.queries[-2:]} == {"true"}


def test_a_pod_without_a_log_is_named_and_the_others_are_printed(
    run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    del server.logs["chat-a"]
    assert run(["logs", "chat", "-n", "team", "--previous"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "[chat-b] three\n"
    assert "chat-a: " in printed.err
    server.logs.clear()
    assert run(["logs", "chat", "-n", "team", "--previous"]) == 2


def test_a_deployment_without_pods_says_where_to_look(
    run: Run, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.pods = []
    assert run(["logs", "chat", "-n", "team"]) == 2
    assert "team/chat has no pods; `flyball status chat -n team` says why" in capsys.readouterr().err


def test_a_long_line_is_printed_in_parts(run: Run, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyball_operator.commands.on_cluster.MAX_LINE_BYTES", 10)
    server.logs = {"chat-a": b"x" * 100_000, "chat-b": b""}
    assert run(["logs", "chat", "-n", "team"]) == 0


def logs_here(folder: Path, *options: str) -> list[str]:
    return ["logs", "chat", "--state-dir", str(folder), *options]


@pytest.mark.parametrize(("tail", "shown"), [(0, []), (1, ["b2"]), (2, ["b1", "b2"]), (9, ["b1", "b2"])])
def test_local_logs_are_the_last_lines_of_each_replica(
    tail: int, shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "chat" / "logs"
    logs.mkdir(parents=True)
    (logs / "replica-1.log").write_text("".join(f"a{i}\n" for i in range(50)))
    (logs / "replica-2.log").write_text("b1\nb2\nunfinished")
    assert main(logs_here(tmp_path, "--tail", str(tail))) == 0
    first = [f"[replica-1] a{i}" for i in range(50 - tail, 50)]
    assert capsys.readouterr().out.splitlines() == first + [f"[replica-2] {line}" for line in shown]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_the_last_lines_are_found_whatever_is_read_at_a_time(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flyball_operator.local.reports.MAX_READ_BYTES", block)
    content = b"one\n\nthree\nfour\n"
    (tmp_path / "replica-1.log").write_bytes(content)
    for tail, rest in enumerate((b"", b"four\n", b"three\nfour\n", b"\nthree\nfour\n", content, content)):
        assert find_last_lines(tmp_path, tail) == {tmp_path / "replica-1.log": len(content) - len(rest)}


def test_no_local_logs_and_options_of_a_cluster_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(logs_here(tmp_path)) == 2
    assert "there are no logs in" in capsys.readouterr().err
    assert main(logs_here(tmp_path, "--previous")) == 2
    assert "--previous is for a cluster" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(logs_here(tmp_path, "--tail", "-1"))


def test_a_log_that_cannot_be_read_is_the_clients_error(server: ApiServer, tmp_path: Path) -> None:
    async def scenario() -> None:
        credentials = await Credentials.of_kubeconfig(str(kubeconfig(tmp_path, "http://127.0.0.1:1")))
        connection = Connection(credentials, Metrics())
        try:
            with pytest.raises(ClusterError, match="get pods/log team/chat-a: the API server does not answer"):
                async for _ in Client(connection).log("team", "chat-a", container="runtime", tail=1):
                    pass
        finally:
            await connection.close()

    asyncio.run(scenario())
    assert issubclass(NotFound, ClusterError)
