"""The Flyball runtime: a continuous-batching server for language models whose limits move while it serves."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("flyball")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
