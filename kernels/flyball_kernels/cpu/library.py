"""Loads the C++ ops."""


def load() -> None:
    """Load the library, building it first when its cache has none; a second call does nothing.

    Raises:
        RuntimeError: it can be neither loaded nor built; the message says what is missing.
    """
    raise RuntimeError("The C++ ops are not built yet.")
