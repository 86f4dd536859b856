"""Small parts of the operator that need no cluster: errors, Events, health, tokens, switches."""

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from flyball_operator import cli
from flyball_operator.cluster import api_server, watches
from flyball_operator.cluster.admin_token import AdminTokens, load_key
from flyball_operator.cluster.api_server import (
    LLM_DEPLOYMENT,
    POD,
    ApiCall,
    ApiError,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    NotFound,
    from_answer,
)
from flyball_operator.cluster.command import tell_unhandled
from flyball_operator.cluster.events import Recorder, event_of
from flyball_operator.cluster.monitoring import Health
from flyball_operator.cluster.reconciler import problem_of
from flyball_operator.observed import Key, Object, Resource
from flyball_operator.steps import Create

CALL = ApiCall("patch", "services", "team/chat")
RESOURCE = Resource(
    key=Key("team", "chat"), uid="u1", generation=1, resource_version="1", spec={}, status={}, deleting=False
)
NO_RULE = (
    'services "chat" is forbidden: User "system:serviceaccount:flyball-system:flyball-operator" cannot patch resource '
    '"services" in API group "" in the namespace "team"'
)
QUOTA = (
    'persistentvolumeclaims "chat-cache" is forbidden: exceeded quota: storage, requested: 5Gi, used: 0, limited: 1Gi'
)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "", Invalid),
        (403, "", Forbidden),
        (404, "", NotFound),
        (409, "", Conflict),
        (410, "", Expired),
        (422, "", Invalid),
        (429, "", api_server.TooManyRequests),
        (500, "etcdserver: request timed out", api_server.Unavailable),
        (500, "failed to create typed patch object (team/chat; apps/v1): .spec.x: field not declared", Invalid),
        (500, 'Internal error occurred: failed calling webhook "policy.example.com": ...', api_server.WebhookFailed),
        (504, "", api_server.Unavailable),
        (418, "", ApiError),
    ],
)
def test_an_answer_becomes_the_error_that_says_what_to_do_about_it(status: int, message: str, kind: type) -> None:
    error = from_answer(CALL, status, {"message": message}, {})
    assert type(error) is kind
    assert str(error).startswith("patch services team/chat: ")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), (None, 1.0), ("Sat, 21 Nov 2026 10:00:00 GMT", 1.0), ("86400", 60.0), ("inf", 60.0), ("nan", 0.0)],
)
def test_retry_after_is_some_seconds_or_a_second(header: str | None, seconds: float) -> None:
    error = from_answer(CALL, 429, {}, {"Retry-After": header} if header else {})
    assert isinstance(error, api_server.TooManyRequests)
    assert error.retry_after_s == seconds


def test_a_missing_rule_is_told_from_a_quota() -> None:
    step = Create({"kind": "Service"}, "")
    missing = problem_of(step, from_answer(CALL, 403, {"message": NO_RULE}, {}))
    assert (missing.reason, missing.accepted) == ("MissingPermission", True)
    assert missing.message.endswith("Grant patch on services")
    quota = problem_of(step, from_answer(CALL, 403, {"message": QUOTA}, {}))
    assert (quota.reason, quota.accepted) == ("Refused", False)


def test_only_a_deployment_that_is_refused_is_an_invalid_pod_template() -> None:
    refused = from_answer(CALL, 422, {"message": "x"}, {})
    reasons = [problem_of(Create({"kind": kind}, ""), refused).reason for kind in ("Deployment", "Service")]
    assert reasons == ["InvalidPodTemplate", "Refused"]


def test_an_events_name_is_its_content() -> None:
    def name(message: str) -> str:
        return str(event_of(RESOURCE, "Normal", "Created", message, "pod-1")["metadata"]["name"])

    assert name("a") == name("a") != name("b")
    assert name("a").startswith("chat.")


class Writes:
    """The part of a Client that a Recorder uses; the second Event of a name is a Conflict."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.renewed: list[str] = []

    async def create(self, _: Any, obj: Object) -> Object:
        name = obj["metadata"]["name"]
        if name in self.created:
            raise from_answer(CALL, 409, {}, {})
        self.created.append(name)
        return obj

    async def merge(self, _kind: Any, _namespace: str, name: str, _change: Object) -> Object:
        self.renewed.append(name)
        return {}


def test_an_event_that_repeats_is_written_once_and_renewed_later() -> None:
    now, writes = [0.0], Writes()

    async def scenario() -> None:
        recorder = Recorder(writes, "pod-1", clock=lambda: now[0])  # type: ignore[arg-type]
        running = asyncio.create_task(recorder.run())
        for at in (0.0, 1.0, 599.0, 600.0):
            now[0] = at
            recorder(RESOURCE, "Warning", "NameConflict", "x")
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(scenario())
    assert (len(writes.created), writes.renewed) == (1, writes.created)


def test_alive_means_that_no_work_takes_for_ever() -> None:
    now = [0.0]
    health = Health(clock=lambda: now[0])
    health.started(Key("team", "chat"))
    now[0] = 299.0
    assert health.stuck is None
    now[0] = 301.0
    assert health.stuck == "no end of team/chat after 300 s"
    health.ended(Key("team", "chat"))
    assert health.stuck is None


def test_tokens_differ_by_resource_and_key_and_so_do_their_secrets() -> None:
    other = Resource(
        key=Key("team", "chat"), uid="u2", generation=1, resource_version="1", spec={}, status={}, deleting=False
    )
    pairs = [(AdminTokens(key), one) for key in (b"a", b"b") for one in (RESOURCE, other)]
    assert len({tokens.token(one) for tokens, one in pairs}) == 4
    assert len({tokens.secret_name(one) for tokens, one in pairs}) == 4
    assert AdminTokens(b"a").token(RESOURCE) == AdminTokens(b"a").token(RESOURCE)


class Holds:
    """The part of a Client that reads a key."""

    def __init__(self, data: Any) -> None:
        self.secret = {"data": data}

    async def find(self, *_: Any) -> Object:
        return self.secret


def test_a_key_that_anybody_could_guess_is_refused() -> None:
    key = bytes(range(32))
    assert asyncio.run(load_key(Holds({"key": base64.b64encode(key).decode()}), "ns")) == key  # type: ignore[arg-type]
    for data in (None, {}, {"key": None}, {"key": ""}, {"key": base64.b64encode(b"short").decode()}):
        with pytest.raises(api_server.ClusterError, match="32 are needed; delete it"):
            asyncio.run(load_key(Holds(data), "ns"))  # type: ignore[arg-type]


def test_kopf_writes_nothing_and_watches_our_objects_only() -> None:
    made = watches.kopf_settings(POD)
    assert (made.posting.enabled, made.scanning.disabled, made.peering.standalone) == (False, True, True)
    assert [*made.watching.label_selectors.values()] == ["app.kubernetes.io/managed-by=flyball-operator"]
    assert not watches.kopf_settings(LLM_DEPLOYMENT).watching.label_selectors


def test_the_delays_between_tries_never_run_out() -> None:
    delays = [delay for delay, _ in zip(watches.Endless(), range(100), strict=False)]
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (0.25, 5.0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "one of the arguments --namespace --all-namespaces is required"),
        (["--all-namespaces", "--namespace=a"], "not allowed with argument"),
        (["--all-namespaces", "--lease-seconds=0"], "0 is out of range; give 1 to 86400 seconds"),
        (["--all-namespaces", "--lease-seconds=nan"], "nan is out of range; give 1 to 86400 seconds"),
        (["--all-namespaces", "--resync-seconds=inf"], "inf is out of range; give 1 to 86400 seconds"),
        (["--all-namespaces", "--metrics-port=65536"], "65536 is not a port"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", *arguments])
    assert problem in capsys.readouterr().err


def test_without_a_cluster_the_way_out_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert cli.main(["run", "--all-namespaces", "--metrics-port=0"]) == 2
    assert "set KUBECONFIG, or run in a pod" in capsys.readouterr().err


def test_a_generator_that_raises_when_the_loop_closes_it_is_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def cut_off() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise RuntimeError("closed before it")

    async def leave(generator: AsyncGenerator[int, None]) -> None:
        asyncio.get_running_loop().set_exception_handler(tell_unhandled)
        await anext(generator)

    caplog.set_level(logging.DEBUG, logger="flyball_operator")
    asyncio.run(leave(generator := cut_off()))
    assert not [record for record in caplog.records if record.exc_info], generator
    assert [record.levelname for record in caplog.records if "closed before it" in record.getMessage()] == ["DEBUG"]


def test_other_errors_that_nobody_handles_are_told_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(tell_unhandled)
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]
