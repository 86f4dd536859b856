"""The tokens of the replicas' admin ports, derived from one key so that the operator never reads a Secret of a user."""

import base64
import hashlib
import hmac
import secrets

from flyball_operator import names
from flyball_operator.cluster.api_server import SECRET, ClusterError, Conflict
from flyball_operator.cluster.client import Client
from flyball_operator.observed import Object, Resource

KEY_SECRET = "flyball-operator-key"
_ENTRY = "key"
_KEY_BYTES = 32


class AdminTokens:
    """Tokens and Secret names of the deployments. Both depend on the key, so pods never get the token of another key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.fingerprint = hashlib.sha256(key).hexdigest()[:10]

    def token(self, resource: Resource) -> str:
        said = f"{resource.key.namespace}/{resource.key.name}/{resource.uid}"
        return hmac.new(self._key, said.encode(), hashlib.sha256).hexdigest()

    def secret_name(self, resource: Resource) -> str:
        return names.admin_token_secret(resource.key.name, resource.uid, self.fingerprint)


async def load_key(client: Client, namespace: str) -> bytes:
    """Return the operator's key from its Secret, which is created if it does not exist.

    Raises:
        ClusterError: the Secret cannot be read or created, or its key is missing or too short.
    """
    found = await client.find(SECRET, namespace, KEY_SECRET) or await _make_key(client, namespace)
    key = _key_in(found)
    if len(key) < _KEY_BYTES:
        raise ClusterError(
            f"Secret {namespace}/{KEY_SECRET} has a key of {len(key)} bytes under {_ENTRY!r}, but {_KEY_BYTES} are needed; "
            "delete it, and the operator creates a new one"
        )
    return key


def _key_in(secret: Object) -> bytes:
    """Return the key; empty if there is none."""
    entry = (secret.get("data") or {}).get(_ENTRY) or ""
    return base64.b64decode(entry)


async def _make_key(client: Client, namespace: str) -> Object:
    key = base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
    metadata = {"name": KEY_SECRET, "namespace": namespace, "labels": {names.MANAGED_BY_LABEL: names.MANAGER}}
    manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {_ENTRY: key}}
    try:
        return await client.create(SECRET, manifest)
    except Conflict:  # another replica was faster
        return await client.get(SECRET, namespace, KEY_SECRET)
