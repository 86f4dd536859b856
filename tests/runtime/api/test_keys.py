"""API keys: who is let in, how the file is read and read again, and what is never said."""

import os
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_protocol import endpoints
from flyball_runtime import cli
from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.api.keys import MAX_FILE_BYTES, OPEN_PATHS, ApiKeys
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.errors import ConfigError
from runtime.api.support import MODEL, asgi_client, error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

OLD, NEW, OF_VARIABLE = "old-key-1234", "new-key-1234", "key-of-the-environment"
COMPLETION = {"prompt": [5], "max_tokens": 1}
NOBODY = 65534


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# of team a\n{OLD}\n\n  another-key  \r\n")
    return path


@pytest.fixture
def keys(file: Path, clock: FakeClock) -> ApiKeys:
    return ApiKeys(file, OF_VARIABLE, clock)


@pytest.fixture
def app(
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    settings: ApiSettings,
    metrics: MetricsCollector,
    keys: ApiKeys,
) -> FastAPI:
    return create_app(engine, tokenizer, settings, metrics, keys)


async def test_requests_need_one_of_the_keys(client: httpx.AsyncClient) -> None:
    for key in (OLD, "another-key", OF_VARIABLE):
        assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
    for headers in (
        {},
        bearer(""),
        bearer("wrong-key"),
        bearer(OLD[:-1]),
        {"Authorization": OLD},
        bearer("# of team a"),
    ):
        for response in (
            await client.get("/v1/models", headers=headers),
            await client.post("/v1/completions", json=COMPLETION, headers=headers),
            await client.post("/tokenize", json={"prompt": "a"}, headers=headers),
            await client.get("/no/such/path", headers=headers),
        ):
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = error_of(response)
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


async def test_probes_metrics_and_preflights_need_none(client: httpx.AsyncClient) -> None:
    for path in OPEN_PATHS:
        assert (await client.get(path)).status_code == 200, path
        assert (await client.get(path + "/")).status_code == 401, path
    assert (await client.options("/v1/models")).status_code == 405


async def test_the_openai_client_understands_the_answer(app: FastAPI) -> None:
    async with asgi_client(app) as transport:
        wrong = openai.AsyncOpenAI(base_url="http://test/v1", api_key="sk-wrong", http_client=transport)
        with pytest.raises(
            openai.AuthenticationError, match="Incorrect API key provided: this server does not have it"
        ) as refused:
            await wrong.models.list()
        assert refused.value.code == "invalid_api_key"
        right = openai.AsyncOpenAI(base_url="http://test/v1", api_key=OLD, http_client=transport)
        assert (await right.models.list()).data[0].id == MODEL


async def test_a_key_is_one_client_however_the_header_spells_it(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for header in (f"Bearer {OLD}", f"bearer {OLD}", f"BEARER   {OLD}", f"Bearer {OF_VARIABLE}"):
        response = await client.post("/v1/completions", json=COMPLETION, headers={"Authorization": header})
        assert response.status_code == 200
    assert (await client.post("/v1/completions", json=COMPLETION, headers={"X-Api-Key": OLD})).status_code == 200
    one, same, again, other, as_anthropic_has_it = (request.client for request in engine.requests)
    assert one == same == again == as_anthropic_has_it != other


async def test_a_key_that_anthropics_clients_send(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models", headers={"X-Api-Key": OLD})).status_code == 200
    for headers in ({"X-Api-Key": ""}, {"X-Api-Key": "wrong-key"}, {"X-Api-Key": OLD} | bearer("wrong-key")):
        response = await client.post("/v1/messages", json={}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert "X-Api-Key" in response.json()["error"]["message"]


def replaced(file: Path, text: str) -> None:
    file.write_text(text)


def swapped(file: Path, text: str) -> None:
    """As the kubelet updates a Secret volume: the file links into ..data, a link that is renamed over."""
    folder = file.parent / f"..{len(text)}"
    folder.mkdir()
    (folder / "keys").write_text(text)
    (file.parent / "..tmp").symlink_to(folder.name)
    (file.parent / "..tmp").rename(file.parent / "..data")
    if not file.is_symlink():
        file.unlink()
        file.symlink_to("..data/keys")


@pytest.mark.parametrize("change", [replaced, swapped])
def test_a_changed_file_is_read_again(
    file: Path, clock: FakeClock, change: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(change)
    change(file, OLD)
    keys = ApiKeys(file, OF_VARIABLE, clock)
    change(file, f"{NEW}\n")
    assert keys.find(OLD) and not keys.find(NEW), "not before a second has passed"
    clock.advance(1)
    with caplog.at_level("DEBUG"):
        assert keys.find(NEW) and not keys.find(OLD) and keys.find(OF_VARIABLE)
    assert "--api-key-file has 1" in caplog.text
    assert NEW not in caplog.text


def test_a_file_that_becomes_unusable_changes_nothing_and_is_told_once(
    file: Path, keys: ApiKeys, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    file.unlink()
    for _ in range(3):
        clock.advance(1)
        assert keys.find(OLD)
    assert caplog.text.count("No such file or directory. The keys that were read before stay valid.") == 1
    file.write_text("")
    clock.advance(1)
    assert keys.find(OLD)
    assert caplog.text.count("has no keys") == 1
    file.write_text(NEW)
    clock.advance(1)
    assert keys.find(NEW) and not keys.find(OLD)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"", "has no keys"),
        (b"# none yet\n\n", "has no keys"),
        (b"good-enough\nsecret", "line 2 of .* 8 to 512 characters"),
        (b"two secret-words", "line 1 of .* without spaces"),
        (b"\xef\xbb\xbfsecret-secret", "line 1"),
        (b"secret-\xc3\xa4\xc3\xb6", "line 1"),
        (b"secret-secret\n" * MAX_FILE_BYTES, "more than 65536 bytes"),
    ],
)
def test_an_unusable_file_stops_start_up_in_one_line(
    tmp_path: Path, content: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    assert cli.main(["serve", "no-such-model", "--api-key-file", str(file)]) == endpoints.EXIT_CONFIG_ERROR
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and str(file) in error
    assert "secret" not in error
    with pytest.raises(ConfigError, match=said):
        ApiKeys(file, None, FakeClock())


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_only_a_regular_file_can_be_read_again(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"not a regular file|directory"):
        ApiKeys(tmp_path / "keys", None, FakeClock())


def test_a_file_that_may_not_be_read_stops_start_up(file: Path) -> None:
    file.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)  # root may read anything
    try:
        with pytest.raises(ConfigError, match=r"cannot read .*Permission denied"):
            ApiKeys(file, None, FakeClock())
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("variable", ["", "short", "with a space"])
def test_a_bad_variable_does_not_open_the_server(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(endpoints.API_KEY_ENV, variable)
    assert cli.main(["serve", "no-such-model"]) == endpoints.EXIT_CONFIG_ERROR
    error = capsys.readouterr().err
    assert "FLYBALL_API_KEY is not an API key" in error
    assert not variable or variable not in error


@pytest.mark.parametrize(
    "words", [["--api-key", "sk-secret"], ["--api-key=sk-secret"], ["--api-key", "sk-secret", "b"]]
)
def test_a_key_among_the_arguments_is_refused_and_not_repeated(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "model", *words])
    error = capsys.readouterr().err
    assert "FLYBALL_API_KEY" in error and "--api-key-file" in error
    assert "secret" not in error


async def test_no_key_is_ever_logged(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        for key in (OLD, "sk-somebody-elses"):
            await client.post("/v1/completions", json=COMPLETION, headers=bearer(key))
    assert OLD not in caplog.text and "somebody" not in caplog.text
