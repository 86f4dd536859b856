"""Disturbances of a model under load, and the load that must not notice them.

A disturbance begins when each replica is in the middle of many streams and has requests waiting, so that a request that is cut
short or refused shows.
"""

import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e_kit.models import LONG_TIMEOUT_S, ROLLOUT_TIMEOUT, Model, is_ready
from e2e_kit.node import NAME
from e2e_kit.replica import RUNNING, WAITING, gauge
from e2e_kit.traffic import Traffic
from e2e_kit.work import NUM_RUNNING, STREAM_S, TooFast, Work, measure

MILLICORES = 400
"""A fraction of a core makes streams of the demo model long, and leaves the rest of the machine to Kubernetes."""
LEAST_MILLICORES = 50
SPARE = 1.25
"""On a fast machine, streams are made so much longer than need be: its speed varies."""
BUSY: dict[str, Any] = {
    "runtime": {"maxNumSeqs": NUM_RUNNING, "kvCacheMemory": "256Mi"},
    "resources": {"requests": {"cpu": f"{LEAST_MILLICORES}m"}, "limits": {"cpu": f"{MILLICORES}m"}},
    "rollout": {"drain": {"preStopSeconds": 3, "timeoutSeconds": 600}},
}
"""Parts of an LLMDeployment whose replicas run NUM_RUNNING streams for many seconds."""
STREAMS_PER_REPLICA = 16
"""Clients that each stream without a pause: more than run at a time."""
MIN_IN_FLIGHT = 8
IN_FLIGHT_TIMEOUT_S = 120.0


class RequestsLost(AssertionError):
    """The traffic has noticed: some requests failed or were answered otherwise than before."""


class Load(Traffic):
    """Traffic that knows the model behind it, and keeps count of what is in flight when something happens."""

    def __init__(self, model: Model, work: Work, num_streams: int) -> None:
        super().__init__(model.url, work, num_streams)
        self._model = model
        self._in_flight: list[int] = []

    def wait_until_busy(self) -> None:
        """Return when each replica runs MIN_IN_FLIGHT requests, as many streams are in flight, and some wait."""
        self._in_flight.append(
            self._model.until(self._busy, f"{MIN_IN_FLIGHT} streams on each replica", LONG_TIMEOUT_S)
        )

    def wait_until_in_flight(self) -> None:
        """Return when MIN_IN_FLIGHT streams are in flight; fewer are when several have just ended and the next ones wait.

        Unlike ``wait_until_busy`` it needs no API server. Raises AssertionError if they stay too few.
        """
        deadline_s = time.monotonic() + IN_FLIGHT_TIMEOUT_S
        while (found := self.in_flight) < MIN_IN_FLIGHT and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self._note(found)

    def note_in_flight(self) -> None:
        """Note how many streams something meets that is happening now. Raises AssertionError if they are too few."""
        self._note(self.in_flight)

    @property
    def figures(self) -> dict[str, float]:
        found = {"disturbances": len(self._in_flight)} | self.verdict.figures
        if self._in_flight:
            found |= {
                "in_flight_min": min(self._in_flight),
                "in_flight_median": statistics.median(self._in_flight),
            }
        return found

    def _note(self, in_flight: int) -> None:
        self._in_flight.append(in_flight)
        assert in_flight >= MIN_IN_FLIGHT, f"only {in_flight} streams are in flight"

    def _busy(self) -> int:
        """Return the number of streams in flight, 0 while they or the replicas' own numbers are too small."""
        pods, in_flight = self._model.ready_pods(), self.in_flight
        try:
            running, waiting = ([gauge(pod, name) for pod in pods] for name in (RUNNING, WAITING))
        except OSError:  # a replica that has just ended
            return 0
        return in_flight if min((in_flight, *running)) >= MIN_IN_FLIGHT and any(waiting) else 0


def work_of(model: Model, stream_s: float = STREAM_S, num_running: int = NUM_RUNNING) -> Work:
    """Measure what fits a model of BUSY; replicas that are too fast for long streams get less CPU first.

    Args:
        stream_s: how long a stream should take.
        num_running: how many streams all replicas together will run.
    Raises:
        TooFast: even with LEAST_MILLICORES.
    """
    millicores = MILLICORES
    while True:
        try:
            return measure(model.url, stream_s, num_running)
        except TooFast as fast:
            if millicores == LEAST_MILLICORES:
                raise
            millicores = max(LEAST_MILLICORES, int(millicores / (SPARE * fast.times)))
            model.patch(resources={"limits": {"cpu": f"{millicores}m"}})
            roll(model, f"with-{millicores}m")


@contextmanager
def undisturbed(
    model: Model, work: Work, figures: dict[str, Any], num_streams: int = STREAMS_PER_REPLICA
) -> Iterator[Load]:
    """Send traffic that must not notice what happens inside, and note what came of it.

    Raises:
        RequestsLost: it has noticed.
    """
    load = Load(model, work, num_streams)
    try:
        with load:
            yield load
    finally:
        figures |= load.figures
    if not load.verdict.is_clean:
        raise RequestsLost(str(load.verdict))


def roll(model: Model, mark: str) -> None:
    """Change the pods' template, and wait until new pods have taken over."""
    model.mark(mark)
    model.kubectl("rollout", "status", f"deployment/{model.name}", ROLLOUT_TIMEOUT)


def drain(model: Model) -> None:
    """Drain our pods off the node. There is no other one, so new pods find it open again once the first has gone."""
    before = uids(model)
    selector = f"--pod-selector=app.kubernetes.io/instance={model.name}"
    command = model.node.kubectl_command("drain", NAME, selector, "--delete-emptydir-data", ROLLOUT_TIMEOUT)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as draining:
        while before <= uids(model) and draining.poll() is None:
            time.sleep(0.1)
        model.node.kubectl("uncordon", NAME)
        _, errors = draining.communicate()
    assert draining.returncode == 0, errors
    model.until(lambda: not before & uids(model), "the end of the pods that were there", LONG_TIMEOUT_S)
    model.until(lambda: all(map(is_ready, model.pods())), "new pods that are ready", LONG_TIMEOUT_S)


def uids(model: Model) -> set[str]:
    return {pod["metadata"]["uid"] for pod in model.pods()}
