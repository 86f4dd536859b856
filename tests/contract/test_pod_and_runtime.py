"""What the operator puts into a pod must be what the runtime takes: its flags, its ports, its probe paths."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from checkpoints import make_tokenizer
from flyball_operator import names
from flyball_operator.local.template import local_deployment
from flyball_operator.spec import manifest, rules
from flyball_protocol import endpoints
from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.cli import add_serve_arguments, build_parser, engine_config_from
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.config import DTYPES, parse_bytes
from flyball_runtime.listener.holder import parse_service
from runtime.fake_engine import FakeEngine

EXAMPLES = Path(__file__).parents[2] / "examples"


PARSER = build_parser()
SERVE_PARSER = argparse.ArgumentParser()
add_serve_arguments(SERVE_PARSER)
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
    apiKeysSecretRef: {name: clients}
  accelerator: {count: COUNT}
"""


def served_paths() -> set[str]:
    """Paths of the runtime's public app."""
    settings = ApiSettings(served_model_names=("test",))
    metrics = MetricsCollector(model_name="test", clock=FakeClock())
    app = create_app(FakeEngine(vocab_size=384), make_tokenizer(), settings, metrics)
    return {route.path for route in app.routes if isinstance(route, APIRoute)}


def pods() -> list[dict[str, Any]]:
    texts = [
        path.read_text() for path in [*sorted(EXAMPLES.glob("*.yaml")), EXAMPLES / "gateway" / "llmdeployment.yaml"]
    ]
    for dtype in DTYPES:
        for count, kv in (
            (0, "kvCacheMemory: 1Gi"),
            (1, "gpuMemoryUtilizationPercent: 80"),
            (1, "kvCacheMemory: 4GiB"),
        ):
            texts.append(EVERY_SETTING.replace("DTYPE", dtype).replace("COUNT", str(count)).replace("KV", kv))
    deployments = [one for text in texts for one in manifest.parse(text, source="test", base=EXAMPLES)]
    return [local_deployment(one)["spec"]["template"]["spec"] for one in deployments]


@pytest.mark.parametrize("size", ["2GiB", "2Gi", "1.5GiB", "0.5G", "500M", "500MB", "500kB", "4096", "4096B"])
def test_a_size_is_the_same_in_a_manifest_and_at_the_command_line(size: str) -> None:
    text = EVERY_SETTING.replace("DTYPE", "auto").replace("COUNT", "1").replace("KV", f'kvCacheMemory: "{size}"')
    (deployment,) = manifest.parse(text, source="test", base=EXAMPLES)
    container = local_deployment(deployment)["spec"]["template"]["spec"]["containers"][0]
    args = PARSER.parse_args(container["args"])
    assert engine_config_from(args, Path(args.model)).kv_cache_memory_bytes == parse_bytes(size)


def containers() -> list[dict[str, Any]]:
    return [pod["containers"][0] for pod in pods()]


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["args"][1].rpartition("/")[2])
def test_arguments_are_the_runtimes(container: dict[str, Any]) -> None:
    assert container["command"] == ["flyball"]
    args = PARSER.parse_args(container["args"])
    config = engine_config_from(args, Path(args.model))  # checks every value's range
    assert (config.device, args.admin_host) == ("cpu" if "--device=cpu" in container["args"] else "cuda", "0.0.0.0")


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["args"][1].rpartition("/")[2])
def test_probes_and_ports_are_the_runtimes(container: dict[str, Any]) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": endpoints.API_PORT, "admin": endpoints.ADMIN_PORT}
    assert {f"--port={endpoints.API_PORT}", f"--admin-port={endpoints.ADMIN_PORT}"} <= set(container["args"])
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["path"] in served_paths()
        assert container[name]["httpGet"]["port"] in ports


def test_the_admin_token_reaches_the_runtime_by_its_variable() -> None:
    for container in containers():
        (token,) = (one for one in container["env"] if one["name"] == endpoints.ADMIN_TOKEN_ENV)
        assert token["valueFrom"]["secretKeyRef"]["key"] == names.ADMIN_TOKEN_KEY


def test_the_listener_has_the_runtimes_port_and_meets_it_where_it_looks() -> None:
    for pod in pods():
        (listener,), (runtime,) = pod["initContainers"], pod["containers"]
        args, served = PARSER.parse_args(listener["args"]), PARSER.parse_args(runtime["args"])
        assert (listener["command"], args.command) == (["flyball"], "listener")
        assert (args.host, args.port) == (served.host, served.port)
        assert {"name": endpoints.LISTENER_ENV, "value": args.socket} in runtime["env"]
        assert parse_service(args.service).port in range(1, 65536)


def test_every_flag_that_a_pod_sets_is_refused_in_extra_args() -> None:
    set_by_operator = {word.partition("=")[0] for container in containers() for word in container["args"][2:]} - {
        "--seed",
        "--num-threads",
    }
    known = {flag for action in SERVE_PARSER._actions for flag in action.option_strings}
    assert set_by_operator <= rules.MANAGED_FLAGS <= known


def test_what_autoscalers_read_is_what_the_runtime_exports() -> None:
    exposed = MetricsCollector(model_name="test", clock=FakeClock()).exposition("")[0].decode()
    for name in (endpoints.REQUESTS_WAITING, endpoints.REQUESTS_RUNNING_RATIO):
        assert f"\n{name} " in exposed, "without labels, as KEDA is told, and before the first request"
