"""The app of port 8001: live limits, evidence and drain, for the operator only. Every path needs the token, see admin_auth."""

import logging
import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware

from flyball_protocol import LimitsUpdate, endpoints
from flyball_protocol.limits import LIMITS_HTTP_STATUS
from flyball_runtime.api.admin_auth import AdminAuth, read_admin_body
from flyball_runtime.api.app import bare_app
from flyball_runtime.api.body import decode
from flyball_runtime.api.errors import json_response
from flyball_runtime.api.metrics import Metrics
from flyball_runtime.core.errors import ConfigError, EngineDead
from flyball_runtime.engine.front import EngineFront

logger = logging.getLogger(__name__)


def create_admin_app(
    front: EngineFront, metrics: Metrics, token: str, wall_clock: Callable[[], float] = time.time
) -> FastAPI:
    """The admin app. Raises ConfigError when ``token`` is empty: there is no admin port without one."""
    if not token.strip():
        raise ConfigError(f"the admin token is empty; set {endpoints.ADMIN_TOKEN_ENV} or leave the admin port off.")
    app = bare_app(
        "Flyball admin", Middleware(AdminAuth, token=token.strip(), wall_clock=wall_clock, started_s=wall_clock())
    )
    routes = AdminRoutes(front, metrics)
    app.add_api_route(endpoints.ADMIN_LIMITS_PATH, routes.get_limits)
    app.add_api_route(endpoints.ADMIN_LIMITS_PATH, routes.post_limits, methods=["POST"])
    app.add_api_route(endpoints.ADMIN_EVIDENCE_PATH, routes.get_evidence)
    app.add_api_route(endpoints.ADMIN_DRAIN_PATH, routes.post_drain, methods=["POST"])
    return app


class AdminRoutes:
    def __init__(self, front: EngineFront, metrics: Metrics) -> None:
        self._front = front
        self._metrics = metrics

    async def get_limits(self) -> Response:
        return json_response(self._front.limits())

    async def post_limits(self, request: Request) -> Response:
        """Apply a LimitsUpdate; the status follows the ack: 200 applied, 202 deferred, 409 stale, 422 rejected."""
        update = decode(await read_admin_body(request), LimitsUpdate)
        ack = await self._front.post_limits(update)
        logger.info(
            "request %s: limits revision %d: %s %s", request.state.request_id, update.revision, ack.status, ack.reason
        )
        return json_response(ack, LIMITS_HTTP_STATUS[ack.status])

    async def get_evidence(self) -> Response:
        front, metrics = self._front, self._metrics
        if front.dead_reason is not None:
            raise EngineDead(front.dead_reason)
        evidence = metrics.measured.evidence(
            metrics.model_name, front.limits(), key=front.info.key, ready=front.ready, draining=front.draining
        )
        return json_response(evidence)

    async def post_drain(self, request: Request) -> Response:
        """Refuse new requests from now on; idempotent. 202: those accepted go on to their end."""
        logger.info("request %s: drain, %d unfinished", request.state.request_id, self._front.num_unfinished)
        self._front.start_drain()
        return json_response({"draining": True, "num_unfinished": self._front.num_unfinished}, 202)
