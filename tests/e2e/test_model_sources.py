"""kubectl apply brings tokens, wherever the model comes from."""

import json
import subprocess

from e2e_kit import images
from e2e_kit.models import SERVED_NAME, Model, from_folder, from_hub
from e2e_kit.node import Node
from hub_look_alike import HubLookAlike


def tokens_by_curl(model: Model) -> int:
    body = {"model": SERVED_NAME, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}
    patient = ("--retry", "5", "--retry-connrefused")  # the Service may be a moment behind the first replica
    command = ("curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "30", *patient)
    answer = subprocess.run(
        (*command, f"{model.url}/v1/chat/completions", "--json", json.dumps(body)), check=True, capture_output=True
    )
    return int(json.loads(answer.stdout)["usage"]["completion_tokens"])


def test_from_an_image(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace)
    model.apply()
    model.wait_ready()
    assert tokens_by_curl(model) > 0


def test_from_the_hub_with_a_token(operator: Node, namespace: str, hub: HubLookAlike) -> None:
    model = from_hub(operator, namespace, hub.url)
    model.apply()
    model.wait_ready()
    assert tokens_by_curl(model) > 0


def test_from_a_claim(operator: Node, namespace: str) -> None:
    model = from_folder(operator, namespace, images.DEMO_MODEL)
    model.apply()
    model.wait_ready()
    assert tokens_by_curl(model) > 0
