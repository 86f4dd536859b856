"""The NetworkPolicy: the API port for those named and the replicas themselves, the admin port for the operator alone."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest, metadata, plain
from flyball_operator.children.platform import Platform
from flyball_operator.spec import LLMDeployment, Peer
from flyball_protocol import endpoints


def network_policy(llm: LLMDeployment, platform: Platform) -> Manifest | None:
    """Return the networking.k8s.io/v1 NetworkPolicy, or None when the spec asks for none.

    Ports are numbers: a name would be looked up in each pod, and podTemplate may rename them.
    """
    if llm.spec.network_policy.mode == "Disabled":
        return None
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(llm),
        "spec": {
            "podSelector": {"matchLabels": names.selector_labels(llm.name)},
            "policyTypes": ["Ingress"],
            "ingress": [_api_rule(llm), _rule(endpoints.ADMIN_PORT, [_operator(platform)])],
        },
    }


def _api_rule(llm: LLMDeployment) -> Manifest:
    peers = llm.spec.network_policy.ingress_from
    if peers is None:
        return _rule(endpoints.API_PORT, None)
    replicas = {"podSelector": {"matchLabels": names.selector_labels(llm.name)}}  # they relay for one that is restarted
    return _rule(endpoints.API_PORT, [*map(_peer, peers), replicas])


def _rule(port: int, peers: list[Manifest] | None) -> Manifest:
    ports = {"ports": [{"port": port, "protocol": "TCP"}]}
    return ports if peers is None else {**ports, "from": peers}


def _peer(peer: Peer) -> Manifest:
    if peer.cidr is not None:
        return {"ipBlock": {"cidr": peer.cidr}}
    selectors = {"namespaceSelector": peer.namespace_selector, "podSelector": peer.pod_selector}
    return {key: plain(value) for key, value in selectors.items() if value is not None}


def _operator(platform: Platform) -> Manifest:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": platform.operator_namespace}},
        "podSelector": {"matchLabels": names.OPERATOR_LABELS},
    }
