"""/v1/models: the served names, in OpenAI's shape with vLLM's max_model_len."""

import time
from typing import Any

from fastapi import Response

from flyball_runtime.api.errors import json_response
from flyball_runtime.api.server import Server


class ModelRoutes:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._created = int(time.time())

    async def list_models(self) -> Response:
        names = self._server.settings.served_model_names
        return json_response({"object": "list", "data": [self._card(name) for name in names]})

    async def retrieve_model(self, model: str) -> Response:
        self._server.check_model(model)
        return json_response(self._card(model))

    def _card(self, name: str) -> dict[str, Any]:
        info = self._server.engine_info()
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "flyball",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
        }
