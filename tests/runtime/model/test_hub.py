"""Finding a model: local directories, and downloads from a look-alike of the Hub on this machine."""

import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.model.hub import resolve_model_path
from hub_look_alike import HubLookAlike

FILES = {
    "config.json": b'{"from": "the look-alike"}',
    "model.safetensors": b"not really",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"must not be fetched",
    "original/params.json": b"must not be fetched",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A running look-alike; yields the client's cache directory."""
    with HubLookAlike("127.0.0.1", "acme/tiny", FILES) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        _point_client_at(server.url, tmp_path, monkeypatch)
        yield tmp_path
        server.shutdown()


def _point_client_at(endpoint: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what HF_ENDPOINT, HF_HOME and HF_TOKEN set; the client reads them when it is imported
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a local directory, which has no revision 'v2'"):
        resolve_model_path(str(tmp_path), revision="v2")


@pytest.mark.parametrize("model", ["/no/such/dir", "./missing", "~/no-such-model-here", "a/b/c", ""])
def test_what_looks_like_a_path_is_not_looked_up(model: str) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        resolve_model_path(model)


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        resolve_model_path(str(file))


def test_download_takes_what_serving_needs(hub: Path) -> None:
    directory = resolve_model_path("acme/tiny")
    fetched = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
    assert fetched == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (directory / "config.json").read_bytes() == FILES["config.json"]
    assert directory.is_relative_to(hub)


def test_a_cached_model_needs_no_network(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = resolve_model_path("acme/tiny")
    _point_client_at("http://127.0.0.1:9", hub, monkeypatch)
    assert resolve_model_path("acme/tiny") == directory


def test_unknown_model(hub: Path) -> None:
    with pytest.raises(ConfigError, match=r"acme/nothing is neither a directory here nor a model at .*HF_TOKEN"):
        resolve_model_path("acme/nothing")


def test_unknown_revision(hub: Path) -> None:
    with pytest.raises(ConfigError, match="acme/tiny has no revision 'v9'"):
        resolve_model_path("acme/tiny", revision="v9")


def test_gated_model(hub: Path) -> None:
    with pytest.raises(ConfigError, match=r"acme/gated is gated: accept its terms at .*/acme/gated, then set HF_TOKEN"):
        resolve_model_path("acme/gated")


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _point_client_at("http://127.0.0.1:9", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="acme/tiny is not a directory here, is not cached, and could not be"):
        resolve_model_path("acme/tiny")


def test_not_an_id() -> None:
    with pytest.raises(ConfigError, match="'acme tiny' is neither a directory nor a Hugging Face id"):
        resolve_model_path("acme tiny")
