"""The command line of the runtime."""

from flyball_operator import names
from flyball_operator.spec import (
    ClaimModel,
    FolderModel,
    HubModel,
    ImageModel,
    LLMDeployment,
    ModelSource,
    size_in_bytes,
)
from flyball_protocol import endpoints


def serve_args(llm: LLMDeployment) -> list[str]:
    """Return the arguments of ``flyball``: serve, the model, and one ``--flag=value`` word per setting."""
    spec, runtime = llm.spec, llm.spec.runtime
    optional = {
        "--revision": llm.model_source.revision if isinstance(llm.model_source, HubModel) else None,
        "--max-model-len": runtime.max_model_len,
        "--gpu-memory-utilization": None if (p := runtime.gpu_memory_utilization_percent) is None else f"{p / 100:.2f}",
        "--kv-cache-memory-bytes": None if (m := runtime.kv_cache_memory) is None else size_in_bytes(m),
    }
    flags = {
        "--host": "0.0.0.0",
        "--port": endpoints.API_PORT,
        "--admin-host": "0.0.0.0",
        "--admin-port": endpoints.ADMIN_PORT,
        "--served-model-name": llm.served_name,
        "--device": "cuda" if spec.accelerator.count else "cpu",
        "--dtype": runtime.dtype,
        "--max-num-seqs": runtime.max_num_seqs,
        "--max-num-batched-tokens": runtime.max_num_batched_tokens,
        "--boot-prior": f"{names.BOOT_PRIOR_MOUNT}/{names.BOOT_PRIOR_FILE}",
        "--drain-timeout": spec.rollout.drain.timeout_seconds,
        "--drain-quiet": spec.rollout.drain.pre_stop_seconds,  # a kube-proxy that is behind goes on sending requests
        **{flag: value for flag, value in optional.items() if value is not None},
    }
    words = [f"{flag}={value}" for flag, value in flags.items()]
    return ["serve", _model_argument(llm.model_source), *words, *runtime.extra_args]


def _model_argument(source: ModelSource) -> str:
    """Return what ``flyball serve`` is told to load, as seen from inside the pod."""
    match source:
        case HubModel(repo=repo):
            return repo
        case ClaimModel(folder=folder):
            return f"{names.MODEL_MOUNT}/{folder}".rstrip("/")
        case ImageModel():
            return names.MODEL_MOUNT
        case FolderModel(path=path):
            return str(path)
