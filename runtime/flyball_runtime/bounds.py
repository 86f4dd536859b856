"""Measures what a CPU reaches with torch's copy and matrix product, to compare Flyball's own ops with."""

import statistics
import time
from collections.abc import Callable

from msgspec import Struct

COPIED_BYTES = 128 * 2**20
"""More than most caches hold."""
MATRIX = 1536
"""Rows and columns of each matrix."""
MIN_RUNS = 5


class Reached(Struct, frozen=True, kw_only=True):
    """What the machine reached in one measurement.

    Attributes:
        copy_bytes_per_s: bytes that torch copies, read and written, on its threads.
        product_operations_per_s: multiplications and additions of torch's matrix product, on its threads.
        product: dtype of that product: ``bfloat16``, or ``float32`` where oneDNN has no product in bf16.
    """

    copy_bytes_per_s: float
    product_operations_per_s: float
    product: str


class Bounds:
    """The measured limits of an op that reads memory, or that multiplies.

    They are measured again each time, because neighbours on the same host change them.
    """

    def __init__(self, copied_bytes: int = COPIED_BYTES, matrix: int = MATRIX) -> None:
        import torch  # here, so that benchmarks that need no torch can run without it

        self._from, self._to = (torch.ones(copied_bytes // 4) for _ in range(2))
        # with AVX2 alone, oneDNN has no product in bf16, and torch's own is a hundred times slower than that in fp32
        has_bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.dtype = torch.bfloat16 if has_bf16 else torch.float32
        self._left, self._right = (torch.randn(matrix, matrix, dtype=self.dtype) for _ in range(2))

    def copy(self) -> object:
        return self._to.copy_(self._from)

    def read(self) -> object:
        return self._from.max()

    def matmul(self) -> object:
        return self._left @ self._right

    def measure(self, seconds: float = 0.3) -> Reached:
        """Measure both, each for so many seconds."""
        return Reached(
            copy_bytes_per_s=2 * self._to.nbytes / median_seconds(self.copy, seconds),
            product_operations_per_s=2 * len(self._left) ** 3 / median_seconds(self.matmul, seconds),
            product=str(self.dtype).removeprefix("torch."),
        )


def median_seconds(run: Callable[[], object], seconds: float) -> float:
    """Return the median time of a call that is repeated for so many seconds, MIN_RUNS times at least.

    The first quarter of the calls is left out: until then, threads and caches may be cold.
    """
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < MIN_RUNS or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[len(times) // 4 :])
