"""Status says why a model is not ready; each reason is brought about for real."""

from collections.abc import Iterator

import pytest

from e2e_kit import images
from e2e_kit.models import Model
from e2e_kit.node import Node


@pytest.fixture
def gpus(operator: Node) -> Iterator[Node]:
    """A node that may be given GPUs, and has none afterwards."""
    yield operator
    operator.patch_gpus(0)


def test_a_gpu_nobody_has_then_eight(gpus: Node, namespace: str) -> None:
    model = Model(gpus, namespace, accelerator={"count": 8})
    model.apply()
    ready = model.wait_for("Ready", "reason", "InsufficientGPU")
    assert ready["status"] == "False" and "nvidia.com/gpu" in ready["message"]
    gpus.patch_gpus(8)
    model.wait_ready()


def test_an_image_nobody_has(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace, runtime={"image": "localhost/nobody-has-this:1"})
    model.apply()
    assert "localhost/nobody-has-this:1" in model.wait_for("Ready", "reason", "ImagePull")["message"]


def test_too_little_memory(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace, resources={"limits": {"memory": "96Mi"}})
    model.apply()
    assert model.wait_for("Ready", "reason", "OutOfMemory")["status"] == "False"


def test_a_folder_without_a_model(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace, model={"uri": f"oci://{images.PAUSE}"})
    model.apply()
    assert "config.json" in model.wait_for("Ready", "reason", "CrashLoop")["message"]
