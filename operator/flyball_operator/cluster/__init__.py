"""The operator on a real cluster: Kopf watches, a queue orders, one reconcile brings each LLMDeployment to its spec."""
