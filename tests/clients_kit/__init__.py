"""Outside clients, unchanged and with pinned versions, each in an environment of its own against a server of the demo model.

``make clients`` runs all of them; ``python -m clients_kit litellm`` runs one. docs/clients.md has the table.
"""
