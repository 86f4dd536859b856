"""What the operator may do, asked of the API server before it needs it."""

from collections.abc import Sequence
from typing import NamedTuple

from flyball_operator.cluster.client import Client
from flyball_operator.cluster.kinds import ACCESS_REVIEW, Kind


class Right(NamedTuple):
    """A verb on a kind, in one namespace or (None) in all."""

    verb: str
    kind: Kind
    namespace: str | None

    def __str__(self) -> str:
        where = f"in namespace {self.namespace}" if self.namespace else "in all namespaces"
        return f"{self.verb} {self.kind.resource} {where}"


def rights_to_watch(kinds: Sequence[Kind], namespaces: Sequence[str | None]) -> list[Right]:
    """Return what has to be allowed before watching makes sense."""
    return [Right(verb, kind, namespace) for kind in kinds for namespace in namespaces for verb in ("list", "watch")]


async def is_allowed(client: Client, right: Right) -> bool:
    """Return whether the operator has a right. Everybody may ask this about himself."""
    asked = {
        "verb": right.verb,
        "group": right.kind.group,
        "resource": right.kind.plural,
        "namespace": right.namespace or "",
    }
    review = {
        "apiVersion": ACCESS_REVIEW.api_version,
        "kind": ACCESS_REVIEW.kind,
        "metadata": {},
        "spec": {"resourceAttributes": asked},
    }
    answer = await client.create(ACCESS_REVIEW, review)
    return bool(answer["status"]["allowed"])
