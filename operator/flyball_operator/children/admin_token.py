"""The Secret with the token of the pods' admin port."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest, metadata
from flyball_operator.spec import LLMDeployment


def admin_token_secret(llm: LLMDeployment, name: str, token: str) -> Manifest:
    """Return the v1 Secret. It is immutable: another token has another name, so it is only ever created."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(llm, name),
        "type": "Opaque",
        "immutable": True,
        "stringData": {names.ADMIN_TOKEN_KEY: token},
    }
