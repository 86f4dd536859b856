"""/livez, /readyz, /health and /metrics.

Live means making progress: idle, the engine shows it at least once a second; busy, after each layer of a step. So a hung
step is seen, and a long step or a long queue is not mistaken for one. Where one layer of the largest step may take longer
than the flag allows, as measured at start-up, it gets that time. Loading counts as live; how long it may take is the start-up
probe's business.
"""

from fastapi import Request, Response

from flyball_runtime.api.errors import HttpError, json_response
from flyball_runtime.api.server import Server
from flyball_runtime.core.errors import Draining, EngineDead, NotReady
from flyball_runtime.engine.front import EngineFront
from flyball_runtime.engine.heartbeat import pause_limit

RETRY_AFTER_STUCK_S = 5


class HealthRoutes:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def livez(self) -> Response:
        """200 while the engine lives, 503 when a restart is the only way out."""
        check_live(self._server.front, self._server.settings.max_heartbeat_age_s)
        return json_response({"status": "live"})

    async def readyz(self) -> Response:
        """200 while new requests are taken."""
        check_ready(self._server.front, self._server.settings.max_heartbeat_age_s)
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._server.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


def check_live(front: EngineFront, max_heartbeat_age_s: float) -> None:
    """Raise a 503 when the engine is dead or its loop stuck."""
    if front.dead_reason is not None:
        raise HttpError(503, EngineDead.code, str(EngineDead(front.dead_reason)))
    if not front.ready and front.latest_stats() is None:
        return  # it loads
    limit = pause_limit(max_heartbeat_age_s, front.info.longest_pause_s)
    if (age_s := front.heartbeat_age_s()) > limit.seconds:
        raise HttpError(
            503,
            "engine_stuck",
            f"the engine has made no progress for {age_s:.1f} s; {limit.source} allows {limit.seconds:.4g} s. Restart it.",
            retry_after_s=RETRY_AFTER_STUCK_S,
        )


def check_ready(front: EngineFront, max_heartbeat_age_s: float) -> None:
    """Raise a 503 unless the engine is live, loaded and not draining."""
    check_live(front, max_heartbeat_age_s)
    if front.draining:
        raise Draining
    if not front.ready:
        raise NotReady
