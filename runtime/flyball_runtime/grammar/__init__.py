"""Grammars that outputs conform to: compiled for a vocabulary, cached, and tried out in a process of their own first."""
