"""Which accelerators of this machine are free; each belongs to one replica at a time, as a device plugin would have it."""

import os
from collections.abc import Mapping
from pathlib import Path

RESOURCE_NAME = "nvidia.com/gpu"
VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"


def visible_devices(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the NVIDIA devices that processes here may use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE_ENV in environ:
        return tuple(filter(None, (name.strip() for name in environ[VISIBLE_ENV].split(","))))
    numbers = [path.name.removeprefix("nvidia") for path in dev.glob("nvidia[0-9]*")]
    return tuple(sorted(numbers, key=int))


class AcceleratorPool:
    """Hands devices out by replica number."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self._taken: dict[int, tuple[str, ...]] = {}

    @property
    def free(self) -> tuple[str, ...]:
        taken = {device for devices in self._taken.values() for device in devices}
        return tuple(device for device in self.devices if device not in taken)

    def room(self, num_each: int) -> int | None:
        """Return how many more replicas of ``num_each`` devices fit, or None when they need none."""
        return len(self.free) // num_each if num_each else None

    def take(self, number: int, num_devices: int) -> dict[str, str]:
        """Give replica ``number`` its devices; returns the variable that shows it these and no others."""
        if num_devices == 0:
            return {}
        self._taken[number] = self.free[:num_devices]
        return {VISIBLE_ENV: ",".join(self._taken[number])}

    def give_back(self, number: int) -> None:
        self._taken.pop(number, None)
