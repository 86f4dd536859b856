"""Requests with one prompt: one of them computes it, the others wait for that and then share its KV blocks."""

from flyball_runtime.core.request import Sequence


class Forks:
    """Of each fork group, the sequences that run, and those held until one of these has computed the prompt.

    Where none runs any more, the next one computes the prompt itself, or finds it in the prefix cache.
    """

    def __init__(self) -> None:
        self._running: dict[str | None, list[Sequence]] = {}  # by group
        self._held: dict[str, Sequence] = {}  # by request id

    @property
    def num_held(self) -> int:
        return len(self._held)

    def started(self, seq: Sequence) -> None:
        if seq.fork_group is not None:
            self._running.setdefault(seq.fork_group, []).append(seq)

    def stopped(self, seq: Sequence) -> None:
        if seq.fork_group is None:
            return
        running = self._running[seq.fork_group]
        running.remove(seq)
        if not running:
            del self._running[seq.fork_group]

    def source_of(self, seq: Sequence) -> Sequence | None:
        """Return the running sequence of its group that has computed most of the prompt."""
        running = self._running.get(seq.fork_group, ())
        return max(running, key=lambda one: one.num_computed_tokens, default=None)

    def must_wait(self, seq: Sequence) -> bool:
        """Return whether another one is computing the prompt that this one needs."""
        source = self.source_of(seq)
        return source is not None and source.num_computed_tokens < num_shareable(seq)

    def hold(self, seq: Sequence) -> None:
        self._held[seq.request_id] = seq

    def drop(self, seq: Sequence) -> None:
        """Forget a held sequence."""
        del self._held[seq.request_id]

    def take_ready(self) -> list[Sequence]:
        """Take out the held sequences that need not wait any more."""
        ready = [seq for seq in self._held.values() if not self.must_wait(seq)]
        for seq in ready:
            self.drop(seq)
        return ready


def num_shareable(seq: Sequence) -> int:
    """Return how many tokens a sequence may take from others of its group: of the prompt, all but the last."""
    return min(seq.num_prompt_tokens - 1, seq.num_reusable_tokens)
