"""Clients of any OpenAI-compatible server: ``flyball chat``, ``flyball bench`` and ``flyball batch``.

They import the protocol only."""
