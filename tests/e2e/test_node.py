"""The node runs containers, Services reach them, and names resolve."""

from e2e_kit import images
from e2e_kit.node import Node


def test_a_pod_reaches_a_service_by_name(node: Node, namespace: str) -> None:
    server = ("python3", "-m", "http.server", "--directory", "/etc/ssl", "8000")
    node.kubectl(
        "-n",
        namespace,
        "run",
        "web",
        f"--image={images.OPERATOR}",
        "--port=8000",
        "--expose",
        "--command",
        "--",
        *server,
    )
    node.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/web", "--timeout=60s")
    fetch = "import urllib.request as r; print(r.urlopen('http://web:8000/', timeout=5).status)"
    flags = ("--restart=OnFailure", f"--image={images.OPERATOR}", "--command")  # the server may not listen yet
    node.kubectl("-n", namespace, "run", "client", *flags, "--", "python3", "-c", fetch)
    node.kubectl("-n", namespace, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/client", "--timeout=60s")
    assert node.kubectl("-n", namespace, "logs", "client").strip() == "200"
    node.kubectl("-n", namespace, "delete", "pod", "web", "--now")  # it does not listen to SIGTERM
