"""Status says why a model is not ready; each reason is brought about for real.

InvalidPodTemplate and NameConflict need no node: see tests/cluster.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e_kit import images
from e2e_kit.models import Model, from_folder, from_hub
from e2e_kit.node import Node
from hub_look_alike import HubLookAlike


@pytest.fixture
def gpus(operator: Node) -> Iterator[Node]:
    """A node that may be given GPUs, and has none afterwards."""
    yield operator
    operator.patch_gpus(0)


def test_a_gpu_nobody_has_then_eight(gpus: Node, namespace: str) -> None:
    model = Model(gpus, namespace, accelerator={"count": 1})
    model.apply()
    ready = model.wait_for("Ready", "reason", "InsufficientGPU")
    assert ready["status"] == "False" and "nvidia.com/gpu" in ready["message"]
    gpus.patch_gpus(8)
    assert "cuda" in model.wait_for("Ready", "reason", "CrashLoop")["message"].lower()
    on_the_cpu = [one.replace("--device=cuda", "--device=cpu") for one in runtime_container(model)["args"]]
    model.patch(podTemplate={"spec": {"containers": [{"name": "runtime", "args": on_the_cpu}]}})
    model.wait_ready()
    assert runtime_container(model)["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def runtime_container(model: Model) -> dict[str, Any]:
    pod = model.node.get("deployment", model.name, "-n", model.namespace)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return dict(container)


def test_an_image_nobody_has(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace, runtime={"image": "localhost/nobody-has-this:1"})
    model.apply()
    assert "localhost/nobody-has-this:1" in model.wait_for("Ready", "reason", "ImagePull")["message"]


def test_too_little_memory(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace, resources={"limits": {"memory": "96Mi"}})
    model.apply()
    assert model.wait_for("Ready", "reason", "OutOfMemory")["status"] == "False"


def test_a_broken_checkpoint(operator: Node, namespace: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(images.DEMO_MODEL, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    tmp_path.chmod(0o755)  # pods run as another user
    model = from_folder(operator, namespace, broken)
    model.apply()
    assert "model.safetensors" in model.wait_for("Ready", "reason", "CrashLoop")["message"]


def test_a_folder_without_a_model(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace, model={"uri": f"oci://{images.PAUSE}"})
    model.apply()
    assert "config.json" in model.wait_for("Ready", "reason", "CrashLoop")["message"]


def test_a_download_that_takes_its_time(operator: Node, namespace: str, hub: HubLookAlike) -> None:
    hub.may_send.clear()
    model = from_hub(operator, namespace, hub.url)
    model.apply()
    assert model.wait_for("Ready", "reason", "ModelDownload")["status"] == "False"
    hub.may_send.set()
    model.wait_ready()


def test_an_update_and_a_drain(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace)
    model.apply()
    model.wait_ready()
    model.mark("new", wait=False)
    model.wait_for("Ready", "reason", "Updating")
    model.wait_for("Ready", "reason", "Draining")  # the old pod, which sleeps before it ends
    model.wait_for("Ready", "reason", "Serving")
