"""Kubeconfigs as kubectl understands them: tokens, exec plugins, client certificates, OIDC."""

import asyncio
import base64
import json
import ssl
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from aiohttp import web

from flyball_operator.cluster.api_server import POD, ApiError, ClusterError, Unreachable
from flyball_operator.cluster.client import Client
from flyball_operator.cluster.connection import Connection, Credentials
from flyball_operator.cluster.monitoring import Metrics

PLUGIN = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
number = len((folder / "runs").read_text()) + 1 if (folder / "runs").exists() else 1
(folder / "runs").write_text("x" * number)
asked = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
if (folder / "fails").exists():
    sys.exit("the plugin has no session")
status = {"token": f"token-{number}", "expirationTimestamp": (folder / "expires").read_text()}
print(json.dumps({"apiVersion": asked["apiVersion"], "kind": "ExecCredential", "status": status}))
"""


def kubeconfig(folder: Path, user: dict[str, Any], server: str = "http://127.0.0.1:1", **cluster: Any) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


def exec_user(folder: Path, expires_in: timedelta) -> dict[str, Any]:
    """A user whose plugin prints a new token at each run."""
    script = folder / "plugin.py"
    script.write_text(PLUGIN)
    (folder / "expires").write_text((datetime.now(UTC) + expires_in).strftime("%Y-%m-%dT%H:%M:%SZ"))
    version = "client.authentication.k8s.io/v1"
    command = {"command": sys.executable, "args": [str(script), str(folder)], "interactiveMode": "Never"}
    return {"exec": {"apiVersion": version, "env": None, **command}}


def id_token(expires_in: timedelta) -> str:
    claims = json.dumps({"exp": int((datetime.now(UTC) + expires_in).timestamp())})
    return f"e30.{base64.urlsafe_b64encode(claims.encode()).decode().rstrip('=')}.c2ln"


def oidc_user(expires_in: timedelta) -> dict[str, Any]:
    config = {"id-token": id_token(expires_in), "refresh-token": "r", "client-id": "c", "client-secret": "s"}
    return {"auth-provider": {"name": "oidc", "config": {**config, "idp-issuer-url": "https://127.0.0.1:1"}}}


def headers(path: Path, times: int = 1, **options: float) -> list[str | None]:
    """Return the Authorization headers of so many calls."""

    async def scenario() -> list[str | None]:
        credentials = await Credentials.of_kubeconfig(str(path), **options)
        return [await credentials.authorization() for _ in range(times)]

    return asyncio.run(scenario())


def test_a_token(tmp_path: Path) -> None:
    assert headers(kubeconfig(tmp_path, {"token": "t"})) == ["Bearer t"]


def test_a_user_without_credentials_sends_none(tmp_path: Path) -> None:
    assert headers(kubeconfig(tmp_path, {"name-only": True})) == [None]


def test_a_password(tmp_path: Path) -> None:
    told = base64.b64encode(b"u:p").decode()
    assert headers(kubeconfig(tmp_path, {"username": "u", "password": "p"})) == [f"Basic {told}"]


def test_an_exec_plugin_runs_once_while_its_token_is_valid(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, exec_user(tmp_path, timedelta(hours=1)))
    assert headers(path, 3, refresh_s=0.0) == ["Bearer token-1"] * 3


def test_an_exec_plugin_runs_again_before_its_token_runs_out(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, exec_user(tmp_path, timedelta(seconds=30)))
    first, second = headers(path, 2, refresh_s=0.0)
    assert first != second


def test_an_exec_plugin_that_fails_is_an_error(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, exec_user(tmp_path, timedelta(hours=1)))
    (tmp_path / "fails").touch()
    with pytest.raises(ClusterError, match="its exec plugin gave no credentials"):
        headers(path)


def test_an_exec_plugin_that_is_missing_is_an_error(tmp_path: Path) -> None:
    user = exec_user(tmp_path, timedelta(hours=1))
    user["exec"]["command"] = "/nonexistent/plugin"
    with pytest.raises(ClusterError, match="its exec plugin gave no credentials"):
        headers(kubeconfig(tmp_path, user))


def test_an_oidc_token_is_used_until_it_runs_out(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, oidc_user(timedelta(hours=1)))
    (header,) = headers(path)
    assert header is not None and header.startswith("Bearer e30.")
    with pytest.raises(ClusterError, match="its OIDC id-token has run out; use an exec plugin"):
        headers(kubeconfig(tmp_path, oidc_user(timedelta(hours=-1))))


@pytest.mark.parametrize("content", ["", "[]", "a: [", "{}", '{"current-context": "x"}', "\0"])
def test_a_strange_kubeconfig_is_an_error_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(ClusterError, match="kubeconfig cannot be used"):
        headers(path)


Handler = Callable[[web.Request], Awaitable[web.Response]]


def ask(
    handler: Handler, find: Callable[[str], Awaitable[Credentials]], times: int = 1, tls: ssl.SSLContext | None = None
) -> None:
    """Make calls with credentials to a server; each answer below 400 is fine, the others raise."""

    async def scenario() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        port = runner.addresses[0][1]
        connection = Connection(await find(f"{'https' if tls else 'http'}://127.0.0.1:{port}"), Metrics())
        try:
            for _ in range(times):
                await Client(connection).get(POD, "team", "chat")
        finally:
            await connection.close()
            await runner.cleanup()

    asyncio.run(scenario())


def test_after_a_refusal_the_kubeconfig_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's token is said to be valid for long, and is not: it was revoked."""
    monkeypatch.setattr("flyball_operator.cluster.connection.RELOAD_S", 0.0)
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({}, status=401 if len(seen) == 1 else 200)

    async def find(server: str) -> Credentials:
        return await Credentials.of_kubeconfig(
            str(kubeconfig(tmp_path, exec_user(tmp_path, timedelta(hours=1)), server))
        )

    with pytest.raises(ApiError, match="401"):
        ask(answer, find)
    seen.clear()
    (tmp_path / "runs").unlink()

    async def twice(server: str) -> Credentials:
        credentials = await find(server)
        credentials.refused()
        return credentials

    seen.append("a refusal before")
    ask(answer, twice, times=2)
    assert seen[1:] == ["Bearer token-2"] * 2


def test_credentials_that_cannot_be_renewed_fail_the_call_and_no_more(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    async def find(server: str) -> Credentials:
        user = exec_user(tmp_path, timedelta(seconds=1))
        made = await Credentials.of_kubeconfig(str(kubeconfig(tmp_path, user, server)), refresh_s=0.0)
        (tmp_path / "fails").touch()
        return made

    with pytest.raises(Unreachable, match="the credentials cannot be renewed"):
        ask(answer, find)


def test_a_client_certificate_and_a_server_under_another_name(tmp_path: Path) -> None:
    authority = trustme.CA()
    leaf = authority.issue_cert("cluster.example.com")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf.configure_cert(tls)
    authority.configure_trust(tls)
    tls.verify_mode = ssl.CERT_REQUIRED
    client = authority.issue_cert("operator@example.com", common_name="operator")
    names: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        subject = request.transport.get_extra_info("peercert")["subject"]
        names.extend(value for part in subject for key, value in part if key == "commonName")
        return web.json_response({})

    def encoded(pem: bytes) -> str:
        return base64.b64encode(pem).decode()

    async def find(server: str) -> Credentials:
        user = {
            "client-certificate-data": encoded(client.cert_chain_pems[0].bytes()),
            "client-key-data": encoded(client.private_key_pem.bytes()),
        }
        authority_data = encoded(authority.cert_pem.bytes())
        trust = {"certificate-authority-data": authority_data, "tls-server-name": "cluster.example.com"}
        return await Credentials.of_kubeconfig(str(kubeconfig(tmp_path, user, server, **trust)))

    ask(answer, find, tls=tls)
    assert names == ["operator"]


LATER = SimpleNamespace(
    datetime=SimpleNamespace(now=lambda: datetime.now() + timedelta(seconds=61)), timedelta=timedelta
)


def test_a_pods_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet replaces the file."""
    (tmp_path / "token").write_text("first")
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    monkeypatch.setattr("flyball_operator.cluster.connection.SERVICE_ACCOUNT", tmp_path)

    async def scenario() -> None:
        credentials = await Credentials.find()
        assert credentials.server == "https://127.0.0.1:1"
        assert (await credentials.authorization() or "").lower() == "bearer first"
        (tmp_path / "token").write_text("second")
        assert (await credentials.authorization() or "").split()[1] == "first"
        monkeypatch.setattr("kubernetes.aio.config.incluster_config.datetime", LATER)
        assert (await credentials.authorization() or "").split()[1] == "second"

    asyncio.run(scenario())
