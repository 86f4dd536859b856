"""CrashLoopBackOff: wait longer after each crash, and forget about them after a stable run."""


class Backoff:
    """Seconds to wait before the next start: ``first_s``, doubling up to ``most_s``."""

    def __init__(self, first_s: float = 1.0, most_s: float = 60.0, stable_s: float = 60.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._stable_s = stable_s
        self._crashes = 0

    def after_crash(self, ran_s: float) -> float:
        """Return the wait after a run of ``ran_s`` seconds; a run of ``stable_s`` starts the count afresh."""
        self._crashes = 1 if ran_s >= self._stable_s else self._crashes + 1
        return float(min(self._most_s, self._first_s * 2 ** min(self._crashes - 1, 30)))
