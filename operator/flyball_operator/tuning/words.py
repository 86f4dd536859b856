"""Numbers as they stand in sentences: in decisions, Events and status."""


def short(value: float) -> str:
    """Return three digits, or all before the decimal point; never an exponent for a large number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def three_digits(value: float) -> int | float:
    """Return the number that ``short`` shows."""
    number = float(short(value))
    return int(number) if number.is_integer() else number


def duration(seconds: float) -> str:
    """Return a time in milliseconds below a second, else in seconds: ``0.7 ms``, ``12 ms``, ``51 s``."""
    return f"{short(1000 * seconds)} ms" if seconds < 0.9995 else f"{short(seconds)} s"
