"""Slots for LoRA adapters: which adapter has which, and the sequences held until one is free."""

from collections import Counter

from flyball_runtime.core.request import Sequence
from flyball_runtime.scheduler.plan import AdapterWrite, Step


class AdapterSlots:
    """An adapter keeps its slot when its last sequence stops, until another one needs it; the longest unused is taken first.

    While a sequence is held, later ones with adapters are held too. Else those whose adapters have slots could keep them
    in use for ever.
    """

    def __init__(self, num_slots: int) -> None:
        self._unused = list(range(num_slots))
        self._slots: dict[int, int] = {}  # by adapter, in order of last use
        self._num_running: Counter[int] = Counter()  # sequences, by adapter
        self._held: dict[str, Sequence] = {}  # by request id

    @property
    def num_held(self) -> int:
        return len(self._held)

    def must_wait(self, seq: Sequence) -> bool:
        """Return whether a sequence cannot start for want of a slot."""
        if seq.adapter is None:
            return False
        return bool(self._held) or not self._has_slot_for(seq.adapter)

    def take(self, step: Step, adapter: int) -> int:
        """Return the slot for a sequence that is about to start; if the adapter has none, the step gives it one."""
        slot = self._slots.pop(adapter, None)
        if slot is None:
            slot = self._free_slot()
            step.adapter_writes.append(AdapterWrite(slot, adapter))
        self._slots[adapter] = slot
        self._num_running[adapter] += 1
        return slot

    def leave(self, adapter: int) -> None:
        """Note that a sequence has stopped."""
        self._num_running[adapter] -= 1
        if not self._num_running[adapter]:
            del self._num_running[adapter]

    def forget(self, adapter: int) -> None:
        """Free the slot of an adapter without sequences, if it has one."""
        if (slot := self._slots.pop(adapter, None)) is not None:
            self._unused.append(slot)

    def hold(self, seq: Sequence) -> None:
        self._held[seq.request_id] = seq

    def drop(self, seq: Sequence) -> bool:
        """Forget a held sequence; False if it is not held here."""
        return self._held.pop(seq.request_id, None) is not None

    def take_ready(self) -> list[Sequence]:
        """Take out all held sequences if the first of them can start."""
        first = next(iter(self._held.values()))
        if not self._has_slot_for(first.adapter):
            return []
        ready = list(self._held.values())
        self._held.clear()
        return ready

    def _has_slot_for(self, adapter: int | None) -> bool:
        return adapter in self._slots or bool(self._unused) or len(self._num_running) < len(self._slots)

    def _free_slot(self) -> int:
        if self._unused:
            return self._unused.pop()
        idle = next(adapter for adapter in self._slots if adapter not in self._num_running)
        return self._slots.pop(idle)
