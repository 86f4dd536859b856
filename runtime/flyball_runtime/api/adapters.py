"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them; closed unless the server was started to allow them."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from msgspec import Struct

from flyball_protocol.quoting import one_line, quoted
from flyball_runtime.api.errors import LoraUpdatesClosed
from flyball_runtime.api.schemas import without_noops
from flyball_runtime.api.server import Json, Server, convert
from flyball_runtime.core.errors import AdapterNotFound, ConfigError, InvalidAdapter
from flyball_runtime.core.lora import check_name

logger = logging.getLogger(__name__)

LOAD_NOOPS: dict[str, tuple[Any, ...]] = {"is_3d_lora_weight": (None, False)}
UNLOAD_NOOPS: dict[str, tuple[Any, ...]] = {"lora_int_id": (None,)}


class LoadRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to load.

    Attributes:
        lora_name: what requests then call it, as their model.
        lora_path: its folder, in that of --runtime-lora-dir.
        load_inplace: take the place of a loaded adapter of this name, whose requests go on to their end.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to unload.

    Attributes:
        lora_name: what requests call it. Those that run go on to their end.
    """

    lora_name: str


class AdapterRoutes:
    """Loads and unloads adapters for every client that may send requests."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def load(self, request: Request) -> Response:
        _, body = await self._server.read(request, self._to_load, self._check_open)
        path = await asyncio.to_thread(self._found, body.lora_path)
        await self._server.front.adapters.load(body.lora_name, str(path), replaces=body.load_inplace)
        logger.info("loaded adapter %s from %s", quoted(body.lora_name), path)
        return _success(body.lora_name, "added")

    async def unload(self, request: Request) -> Response:
        _, body = await self._server.read(request, self._to_unload, self._check_open)
        self._server.front.adapters.unload(body.lora_name)
        logger.info("unloaded adapter %s", quoted(body.lora_name))
        return _success(body.lora_name, "removed")

    def _check_open(self) -> None:
        self._server.engine_info()
        if self._server.settings.lora_dir is None:
            raise LoraUpdatesClosed

    def _to_load(self, fields: Json) -> LoadRequest:
        body = convert(without_noops(fields, LoadRequest.__struct_fields__, LOAD_NOOPS), LoadRequest)
        try:
            check_name(body.lora_name)
        except ConfigError as error:
            raise InvalidAdapter(str(error), param="lora_name") from None
        if body.lora_name in self._server.settings.served_model_names:
            raise InvalidAdapter(
                f"{quoted(body.lora_name)} is the served model. Choose another name.", param="lora_name"
            )
        return body

    def _to_unload(self, fields: Json) -> UnloadRequest:
        return convert(without_noops(fields, UnloadRequest.__struct_fields__, UNLOAD_NOOPS), UnloadRequest)

    def _found(self, path: str) -> Path:
        """Return the folder that ``path`` names. What lies outside of the allowed folder is not looked at.

        Raises:
            InvalidAdapter: it is outside.
            AdapterNotFound: it is not there.
        """
        root = self._server.settings.lora_dir
        assert root is not None, "checked before the body was read"
        try:
            found = (root / path).resolve()
            if not found.is_relative_to(root):
                raise InvalidAdapter(
                    f"lora_path is {quoted(path)}; it must be a folder in {root} (--runtime-lora-dir).",
                    param="lora_path",
                )
            is_there = (found / "adapter_config.json").is_file()
        except (OSError, ValueError, RuntimeError) as error:  # a folder that is locked, a null byte, a loop of links
            why = one_line(error.strerror or "" if isinstance(error, OSError) else str(error))
            raise InvalidAdapter(
                f"lora_path is {quoted(path)}, which cannot be read: {why}.", param="lora_path"
            ) from None
        if not is_there:
            raise AdapterNotFound(
                f"lora_path is {quoted(path)}, where no adapter_config.json is. Check the path.", param="lora_path"
            )
        return found


def _success(name: str, what: str) -> Response:
    """What vLLM answers."""
    return Response(f"Success: LoRA adapter '{name}' {what} successfully.", media_type="text/plain")
