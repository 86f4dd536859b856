"""Turns LLMDeployments into running, tuned runtime replicas: on Kubernetes, or as processes on one machine."""
