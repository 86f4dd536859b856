import pytest

from flyball_clients.endpoint import Endpoint, normalise_base_url
from flyball_clients.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("https://h/models/a/v1/", "https://h/models/a"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_v1_may_be_given_or_not(given: str, base: str) -> None:
    assert normalise_base_url(given) == base


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://h", "http://", "http://h:99999", "http://h:x", "http://h?a=1"]
)
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        normalise_base_url(url)


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="--api-key-env") as caught:
        normalise_base_url("http://me:hunter2@h")
    assert "hunter2" not in str(caught.value)


def test_the_key_comes_from_the_environment_and_stays_out_of_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    endpoint = Endpoint.resolve("http://h", "SOME_KEY")
    assert endpoint.headers["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(endpoint)


@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(ConfigError, match="SOME_KEY, which is not set"):
        Endpoint.resolve("http://h", "SOME_KEY")
