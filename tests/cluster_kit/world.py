"""One namespace of a cluster, spoken of in a few words."""

from collections.abc import Callable
from typing import Any

from cluster_kit.api import Api, until
from cluster_kit.llm import condition, llm
from flyball_operator.cluster.api_server import LLM_DEPLOYMENT, Kind

Object = dict[str, Any]
NAME = "chat"


class World:
    """``name`` is that of the LLMDeployment, and of its children, unless something else is given."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    def create(self, name: str = NAME, **spec: Any) -> Object:
        return self.api.create(LLM_DEPLOYMENT, llm(self.namespace, name, **spec))

    def change(self, name: str = NAME, **spec: Any) -> None:
        self.api.merge(LLM_DEPLOYMENT, self.namespace, name, {"spec": spec})

    def get(self, kind: Kind, name: str = NAME) -> Object | None:
        return self.api.get(kind, self.namespace, name)

    def appears(self, kind: Kind, name: str = NAME, *, where: Callable[[Object], Any] = bool) -> Object:
        def found() -> Object | None:
            obj = self.get(kind, name)
            return obj if obj is not None and where(obj) else None

        return until(found, f"{kind.kind} {name} as wanted; {self.says(name)}")

    def goes(self, kind: Kind, name: str = NAME) -> None:
        until(lambda: self.get(kind, name) is None, f"the end of {kind.kind} {name}")

    def ready_is(self, reason: str, name: str = NAME) -> Object:
        def found() -> Object | None:
            ready = condition(self.get(LLM_DEPLOYMENT, name), "Ready")
            return ready if ready.get("reason") == reason else None

        return until(found, f"Ready with reason {reason}; {self.says(name)}")

    def says(self, name: str = NAME) -> Object:
        return (self.get(LLM_DEPLOYMENT, name) or {}).get("status", {})
