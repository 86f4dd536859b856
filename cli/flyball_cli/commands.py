"""The commands of ``flyball``, and the packages that have them."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
        extra: the pip extra with its dependencies; its code is ``main`` of ``flyball_EXTRA.cli``.
        summary: its line in the help; None for a command that only Flyball itself runs, which the help leaves out.
    """

    extra: str
    summary: str | None


COMMANDS = {
    "serve": Command("runtime", "serve a model with an OpenAI-compatible API"),
    "doctor": Command("runtime", "say what this machine has for serving, and should reach"),
    "chat": Command("clients", "talk to a served model in the terminal"),
    "bench": Command("clients", "measure a served model: latency, throughput, goodput"),
    "batch": Command("clients", "answer the requests of a file in OpenAI's batch format"),
    "simulate": Command("simulation", "run a trace through the engine and the tuner on a simulated clock"),
    "listener": Command("runtime", None),
    "local": Command("operator", "run an LLMDeployment as processes on this machine"),
    "status": Command("operator", "print the state of a deployment, on this machine or on a cluster"),
    "explain": Command("operator", "tell what tuning did to a deployment, and why"),
    "logs": Command("operator", "print the logs of a deployment's replicas, on this machine or on a cluster"),
    "validate": Command("operator", "check the LLMDeployments in a file"),
    "render": Command("operator", "print the Kubernetes objects that an LLMDeployment stands for"),
    "crd": Command("operator", "print the CustomResourceDefinition"),
}
