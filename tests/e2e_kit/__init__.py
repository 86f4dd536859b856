"""A whole Kubernetes node for tests, in namespaces of its own; ``python -m e2e_kit`` runs tests/e2e on it."""

FOLDER_VARIABLE = "FLYBALL_E2E_FOLDER"
"""Names the node's folder to the tests: set by ``python -m e2e_kit``, once the machine is prepared."""
