"""Distribution of output lengths, and how many tokens running requests are still expected to generate."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable

from flyball_protocol import Lengths
from flyball_runtime.core.request import Sequence

KEEP = 0.998
"""Factor by which each new request lowers the weight of earlier ones: the tables describe about the last 500."""

NUM_AGES = 18
"""Ages are output tokens so far, by their bit length: 0, 1, 2 to 3, 4 to 7, and so on."""

MIN_REQUESTS = 16
MAX_ROUTES = 64
KEPT_OUTPUTS = 512
ONE_PERCENT = 2.33
"""Standard deviations above the mean that a normal quantity exceeds once in 100 times."""


class OutputLengths:
    """The distribution of output lengths as residual life: how many tokens followed after a request reached an age.

    Each route (for example a client) has its own table from MIN_REQUESTS requests on; until then, the table of all requests is
    used. The MAX_ROUTES most recently used routes are kept.
    """

    def __init__(self) -> None:
        self._all = _ResidualLife()
        self._routes: OrderedDict[str, _ResidualLife] = OrderedDict()
        self._weight = 0.0
        self._moments = [0.0] * 5  # i, computed i, its square, o, o * (i + o / 2)
        self._outputs: deque[int] = deque(maxlen=KEPT_OUTPUTS)

    def observe(
        self, num_prompt_tokens: int, num_output_tokens: int, *, num_cached_tokens: int = 0, route: str = ""
    ) -> None:
        """Add a request that ended with this many tokens. Requests without output are ignored."""
        if num_output_tokens < 1:
            return
        self._all.observe(num_output_tokens)
        self._of_route(route).observe(num_output_tokens)
        self._outputs.append(num_output_tokens)
        prompt, output, computed = num_prompt_tokens, num_output_tokens, num_prompt_tokens - num_cached_tokens
        sample = (prompt, computed, computed * computed, output, output * (prompt + output / 2))
        self._weight = self._weight * KEEP + 1.0
        self._moments = [old * KEEP + new for old, new in zip(self._moments, sample, strict=True)]

    def expected_remaining(self, num_output_tokens: int, route: str = "") -> float | None:
        """Return the expected number of further tokens of a request that has this many; None while nothing is known."""
        table = self._table(route)
        return None if table is None else table.mean[_age(num_output_tokens)]

    def reserve(self, running: Iterable[Sequence], sigmas: float = ONE_PERCENT) -> int:
        """Return an upper bound on the tokens by which running requests will grow together; 0 while nothing is known.

        It is ``sigmas`` standard deviations above the mean of a normal distribution: the sum of their residual lives, each
        cut at its own maximum. It takes about half a microsecond a sequence.
        """
        total = variance = 0.0
        for seq in running:
            if (table := self._table(seq.client)) is None:
                continue
            num_tokens = len(seq.token_ids)
            age, left = _age(num_tokens - seq.num_prompt_tokens), seq.max_total_tokens - num_tokens
            mean = table.mean[age]
            total += min(mean, left)
            variance += min(table.variance[age], float(left * left))
        return math.ceil(total + sigmas * math.sqrt(variance) - 1e-3)  # rounding errors are no token

    def snapshot(self) -> Lengths | None:
        """Return the means over the requests that ended lately; None before MIN_REQUESTS of them."""
        if self._all.num_requests < MIN_REQUESTS:
            return None
        prompt, computed, squared, output, area = (one / self._weight for one in self._moments)
        ordered = sorted(self._outputs)
        return Lengths(
            num_requests=self._weight,
            prompt_tokens=prompt,
            computed_prompt_tokens=computed,
            computed_prompt_tokens_squared=squared,
            output_tokens=output,
            output_tokens_p95=float(ordered[int(0.95 * (len(ordered) - 1))]),
            context_tokens=area / output,
        )

    def _of_route(self, route: str) -> "_ResidualLife":
        table = self._routes.pop(route, None) or _ResidualLife()
        self._routes[route] = table
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)
        return table

    def _table(self, route: str) -> "_ResidualLife | None":
        table = self._routes.get(route)
        if table is not None and table.num_requests >= MIN_REQUESTS:
            return table
        return self._all if self._all.num_requests >= MIN_REQUESTS else None


class _ResidualLife:
    """Mean and variance of the tokens that follow, by age; each request counts at all ages that it reached.

    Attributes:
        mean, variance: by age; ages that no request reached have the values of the last age before them.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.mean = [0.0] * NUM_AGES
        self.variance = [0.0] * NUM_AGES
        self._weight = [0.0] * NUM_AGES
        self._sum = [0.0] * NUM_AGES
        self._squares = [0.0] * NUM_AGES

    def observe(self, num_output_tokens: int) -> None:
        self.num_requests += 1
        last = _age(num_output_tokens)
        for age in range(last + 1):
            rest = num_output_tokens - (1 << age >> 1)
            self._weight[age] = self._weight[age] * KEEP + 1.0
            self._sum[age] = self._sum[age] * KEEP + rest
            self._squares[age] = self._squares[age] * KEEP + rest * rest
        mean = variance = 0.0
        for age, weight in enumerate(self._weight):
            if weight > 0.0:
                mean = self._sum[age] / weight
                variance = max(0.0, self._squares[age] / weight - mean * mean)
            self.mean[age], self.variance[age] = mean, variance


def _age(num_output_tokens: int) -> int:
    return min(NUM_AGES - 1, num_output_tokens.bit_length())
