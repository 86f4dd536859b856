"""The parts of a pod that local mode reads. ``spec.podTemplate`` can put anything anywhere, so types are checked here."""

from typing import Annotated, Any

from msgspec import Meta, Struct

KUBERNETES_GRACE_S = 30.0
"""What Kubernetes takes when a pod names no grace period."""

MAX_SECONDS = 1e9

Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Period = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]


class _Part(Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class HttpGet(_Part, frozen=True, kw_only=True):
    path: Annotated[str, Meta(pattern=r"^/[!-~]*\Z")]


class PodProbe(_Part, frozen=True, kw_only=True):
    period_seconds: Period
    timeout_seconds: Period
    failure_threshold: Annotated[int, Meta(ge=1)]
    http_get: HttpGet | None = None
    termination_grace_period_seconds: Seconds | None = None


class Sleep(_Part, frozen=True, kw_only=True):
    seconds: Seconds = 0.0


class PreStop(_Part, frozen=True, kw_only=True):
    sleep: Sleep = Sleep()


class Lifecycle(_Part, frozen=True, kw_only=True):
    pre_stop: PreStop = PreStop()


class Variable(_Part, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[^=]+\Z")]
    value: str = ""
    value_from: Any = None


class Mount(_Part, frozen=True, kw_only=True):
    name: str
    mount_path: str


class HostPath(_Part, frozen=True, kw_only=True):
    path: str


class Volume(_Part, frozen=True, kw_only=True):
    name: str
    host_path: HostPath | None = None
    persistent_volume_claim: Any = None


class Resources(_Part, frozen=True, kw_only=True):
    limits: dict[str, Annotated[int, Meta(ge=0)] | str] = {}


class Container(_Part, frozen=True, kw_only=True):
    name: str
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[Variable, ...] = ()
    env_from: tuple[Any, ...] = ()
    volume_mounts: tuple[Mount, ...] = ()
    lifecycle: Lifecycle = Lifecycle()
    resources: Resources = Resources()
    startup_probe: PodProbe | None = None
    readiness_probe: PodProbe | None = None
    liveness_probe: PodProbe | None = None


class Pod(_Part, frozen=True, kw_only=True):
    containers: Annotated[tuple[Container, ...], Meta(min_length=1)]
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[Volume, ...] = ()
    termination_grace_period_seconds: Seconds = KUBERNETES_GRACE_S
