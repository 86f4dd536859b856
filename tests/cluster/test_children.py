"""Every child that can be built is one that an API server takes as it is, strictly."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_kit import Cluster
from flyball_operator import children, names
from flyball_operator.observed import Object
from flyball_operator.spec import manifest
from flyball_operator.steps import differences
from flyball_protocol import endpoints
from operator_kit.api_server import ApiServer
from operator_kit.foreign_crds import installed
from operator_kit.specs import SpecMaker

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = [*sorted(FOLDER.glob("*.yaml")), *sorted(FOLDER.glob("gateway/*.yaml"))]
PLATFORM = children.Platform()
LOCAL_ONLY = "file: models are for flyball local"
BOOT_PRIOR = {"revision": 3, "limits": {"max_num_seqs": 8, "kv_cache_fraction": 0.5, "max_num_batched_tokens": 64}}


@pytest.fixture(scope="module", autouse=True)
def foreign_crds(cluster: Cluster) -> Iterator[None]:
    with installed(cluster):
        yield


def build(document: dict[str, Any]) -> list[Object]:
    llm = manifest.parse_document(document, source="test", base=Path("/srv"))
    token = children.token_secret(llm, "chat-admin", "0" * 64)
    return [token, *children.build(llm, PLATFORM, admin_token_secret="chat-admin", boot_prior=BOOT_PRIOR)]


def test_children_of_random_specs_are_accepted(api_server: ApiServer) -> None:
    make = SpecMaker(seed=3)
    kinds = set()
    for i in range(100):
        document = make.valid()
        if i % 10 == 0:  # few valid random specs have an autoscaler
            document["spec"]["autoscaling"] = {"mode": ("HPA", "KEDA")[i // 10 % 2], "maxReplicas": 3}
        for child in build(document):
            assert child == json.loads(json.dumps(child)), (
                "what is compared with what is observed is made of JSON's types"
            )
            answer = api_server.apply(child)
            assert answer.message == "", f"{child}\nof {document['spec']}"
            assert child["kind"] == "Secret" or not [*differences(child, answer.body)], "applied once, and at rest"
            kinds.add(child["kind"])
    assert kinds == {
        *(
            "Deployment",
            "Service",
            "Secret",
            "ConfigMap",
            "HorizontalPodAutoscaler",
            "ScaledObject",
            "PodDisruptionBudget",
        ),
        *("NetworkPolicy", "PersistentVolumeClaim", "PodMonitor"),
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_an_example_and_its_children_are_accepted(api_server: ApiServer, example: Path) -> None:
    for document in yaml.safe_load_all(example.read_text()):
        document["metadata"].setdefault("namespace", "default")
        refused = LOCAL_ONLY if example.name == "demo.yaml" else ""
        assert refused in (said := api_server.create(document).message) and bool(said) == bool(refused)
        for child in build(document) if document["kind"] == names.KIND else ():
            assert api_server.apply(child).message == "", child


def test_the_pool_of_the_gateway_example_selects_the_pods_of_its_deployment() -> None:
    (llm,) = manifest.read_file(FOLDER / "gateway" / "llmdeployment.yaml")
    pool, _ = yaml.safe_load_all((FOLDER / "gateway" / "route.yaml").read_text())
    assert pool["spec"]["selector"]["matchLabels"] == names.selector_labels(llm.name)
    assert pool["spec"]["targetPorts"] == [{"number": endpoints.API_PORT}]
