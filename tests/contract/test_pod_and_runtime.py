"""What the operator puts into a pod must be what the runtime takes: its flags, its ports, its probe paths."""

from pathlib import Path
from typing import Any

import pytest

from flyball_operator import children, manifest, rules
from flyball_protocol import endpoints

EXAMPLES = Path(__file__).parents[2] / "examples"

# Flags of `flyball serve` and a value that each takes.
SERVE_FLAGS = {
    "--host": str,
    "--port": int,
    "--admin-host": str,
    "--admin-port": int,
    "--served-model-name": str,
    "--revision": str,
    "--device": ("auto", "cpu", "cuda"),
    "--dtype": ("auto", "bfloat16", "float16", "float32"),
    "--max-model-len": int,
    "--max-num-seqs": int,
    "--max-num-batched-tokens": int,
    "--gpu-memory-utilization": float,
    "--kv-cache-memory-bytes": int,
    "--drain-timeout": float,
    "--seed": int,
}
# Paths that the runtime's API serves for probes.
PROBE_PATHS = {endpoints.LIVEZ_PATH, endpoints.READYZ_PATH}

EVERY_SETTING = """
apiVersion: flyball.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {uri: "hf://org/name", revision: v2, servedName: org/chat}
  runtime:
    dtype: DTYPE
    maxModelLen: 512
    maxNumSeqs: 8
    maxNumBatchedTokens: 64
    KV
    extraArgs: [--seed=1]
  accelerator: {count: COUNT}
"""


def containers() -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.yaml"))]
    for dtype in ("Auto", "BFloat16", "Float16", "Float32"):
        for count, kv in ((0, "kvCacheMemory: 1Gi"), (1, "kvCacheMemoryPercent: 80"), (1, "kvCacheMemory: 4Gi")):
            texts.append(EVERY_SETTING.replace("DTYPE", dtype).replace("COUNT", str(count)).replace("KV", kv))
    deployments = [one for text in texts for one in manifest.parse(text, source="test", base=EXAMPLES)]
    return [children.deployment(one)["spec"]["template"]["spec"]["containers"][0] for one in deployments]


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["args"][1].rpartition("/")[2])
def test_arguments_are_the_runtimes(container: dict[str, Any]) -> None:
    command, model, *words = container["args"]
    assert (container["command"], command) == (["flyball"], "serve")
    assert not model.startswith("-")
    for word in words:
        flag, _, value = word.partition("=")
        kind = SERVE_FLAGS[flag]
        assert value in kind if isinstance(kind, tuple) else kind(value) is not None, word


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["args"][1].rpartition("/")[2])
def test_probes_and_ports_are_the_runtimes(container: dict[str, Any]) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": endpoints.API_PORT, "admin": endpoints.ADMIN_PORT}
    assert {f"--port={endpoints.API_PORT}", f"--admin-port={endpoints.ADMIN_PORT}"} <= set(container["args"])
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["path"] in PROBE_PATHS
        assert container[name]["httpGet"]["port"] in ports


def test_the_admin_token_reaches_the_runtime_by_its_variable() -> None:
    for container in containers():
        assert [one["name"] for one in container["env"] if "valueFrom" in one] == [endpoints.ADMIN_TOKEN_ENV]


def test_every_flag_that_a_pod_sets_is_refused_in_extra_args() -> None:
    set_by_operator = {word.partition("=")[0] for container in containers() for word in container["args"][2:]} - {
        "--seed"
    }
    assert set_by_operator <= rules.MANAGED_FLAGS <= {*SERVE_FLAGS, "--admin-token-file"}
