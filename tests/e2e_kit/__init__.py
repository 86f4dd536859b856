"""A whole Kubernetes node for tests, in namespaces of its own; ``python -m e2e_kit`` runs tests/e2e on it."""
