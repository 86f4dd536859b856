"""The Flyball runtime: a continuous-batching server for language models whose limits move while it serves."""

from flyball_protocol import installed_version

__version__ = installed_version()
