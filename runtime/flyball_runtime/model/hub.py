"""From what the user calls a model to a directory on this machine."""

import logging
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from flyball_runtime.core.checkpoint import Checkpoint, check_tokenizer_files
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig, is_native

logger = logging.getLogger(__name__)

ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# the same weights again in other layouts: Meta's, Mistral's, and exports for other runtimes
IGNORE_PATTERNS = ["original/*", "consolidated*", "onnx/*", "openvino/*"]


def find_checkpoint(model: str, revision: str | None = None, model_impl: str = "auto") -> Path:
    """Return the directory that ``model`` names, having seen that a servable config.json and a tokenizer are in it.

    What transformers implements is looked at more closely by the engine, which has torch.

    Raises:
        ConfigError: as ``resolve_model_path``, or something is missing, unreadable or not supported.
    """
    path = resolve_model_path(model, revision)
    (ModelConfig if is_native(path, model_impl) else Checkpoint).from_dir(path)
    check_tokenizer_files(path)
    return path


def resolve_model_path(model: str, revision: str | None = None) -> Path:
    """Return the directory that ``model`` names: a local one, else a Hugging Face id, downloaded unless cached.

    The Hub's own environment variables hold: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.

    Args:
        revision: branch, tag or commit of a Hugging Face id; None is its main branch.
    Raises:
        ConfigError: it is neither, or the download failed; the message names the model and the way out.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{model} is a local directory, which has no revision {revision!r}. Leave the revision out."
            )
        return path
    if path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ConfigError(
            f"{model!r} is not a directory. Give a checkpoint directory or a Hugging Face id (owner/name)."
        )
    return _download(model, revision)


def _download(model_id: str, revision: str | None) -> Path:
    logger.info("looking up %s in the local cache and on %s", model_id, huggingface_hub.constants.ENDPOINT)
    try:
        directory = huggingface_hub.snapshot_download(
            model_id, revision=revision, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS
        )
    except (OSError, HFValidationError) as error:  # every error of the Hub's client but one is an OSError
        raise ConfigError(_why_not(model_id, revision, error)) from error
    return Path(directory)


def _why_not(model_id: str, revision: str | None, error: Exception) -> str:
    page = f"{huggingface_hub.constants.ENDPOINT}/{model_id}"
    match error:
        case HFValidationError():
            return f"{model_id!r} is neither a directory nor a Hugging Face id (owner/name)."
        case GatedRepoError():
            return f"{model_id} is gated: accept its terms at {page}, then set HF_TOKEN to a token of that account."
        case RevisionNotFoundError():
            return f"{model_id} has no revision {revision!r}. See {page}/tree/main for its branches and tags."
        case RepositoryNotFoundError():
            return (
                f"{model_id} is neither a directory here nor a model at {page}. "
                "Check the spelling; for a private model, set HF_TOKEN."
            )
        case _:
            return (
                f"{model_id} is not a directory here, is not cached, and could not be downloaded "
                f"({type(error).__name__}: {error}). "
                f"Download it where there is a network (hf download {model_id}) and give the directory's path instead."
            )
