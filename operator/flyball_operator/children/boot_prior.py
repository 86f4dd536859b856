"""The ConfigMap with what new pods start from: the limits that were good last."""

import json
from collections.abc import Mapping
from typing import Any

from flyball_operator import names
from flyball_operator.children.manifest import Manifest, metadata
from flyball_operator.spec import LLMDeployment


def boot_prior_map(llm: LLMDeployment, boot_prior: Mapping[str, Any] | None) -> Manifest | None:
    """Return the v1 ConfigMap, or None while there is nothing to say.

    It is a volume of the pods, optional and not part of their template's content, so a change rolls no pod.
    """
    if boot_prior is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(llm, names.boot_prior_map(llm.name)),
        "data": {names.BOOT_PRIOR_FILE: json.dumps(boot_prior, sort_keys=True)},
    }
