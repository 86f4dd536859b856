"""Clients of any OpenAI-compatible server: ``flyball chat`` and ``flyball bench``. They import the protocol only."""
