"""The version of Flyball that is installed."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(otherwise: str = "0+unknown") -> str:
    """Return the installed version; ``otherwise`` in a source tree that was never installed."""
    try:
        return version("flyball")
    except PackageNotFoundError:
        return otherwise
