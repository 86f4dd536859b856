"""Which models a server has."""

import aiohttp
import msgspec
from msgspec import Struct

from flyball_runtime.client.chunk import error_message
from flyball_runtime.client.endpoint import Endpoint
from flyball_runtime.client.errors import BadAnswer, HttpError
from flyball_runtime.client.stream import translated


class ModelCard(Struct, frozen=True):
    """One entry of /v1/models. ``max_model_len`` is in tokens; not every server says it."""

    id: str
    max_model_len: int | None = None


class _ModelList(Struct, frozen=True):
    data: list[ModelCard]


async def list_models(session: aiohttp.ClientSession, endpoint: Endpoint) -> list[ModelCard]:
    """Raises EndpointError when the server is not there or has no such list."""
    async with translated(session, endpoint), session.get(endpoint.models_url) as response:
        body = await response.read()
        if response.status != 200:
            raise HttpError(response.status, error_message(body))
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadAnswer(f"{endpoint.models_url} sent no list of models: {exc}") from exc


async def find_model(session: aiohttp.ClientSession, endpoint: Endpoint, name: str | None) -> ModelCard:
    """The model ``name``, or the first that the server lists.

    A name that is not listed is taken as it is: servers may route names that they do not list.

    Raises:
        EndpointError: the server is not there, or ``name`` is None and it lists nothing.
    """
    try:
        cards = await list_models(session, endpoint)
    except (HttpError, BadAnswer):
        if name is None:
            raise
        cards = []  # the caller knows the name, so a server without a list will do
    if name is not None:
        return next((card for card in cards if card.id == name), ModelCard(name))
    if not cards:
        raise BadAnswer(f"{endpoint.models_url} lists no model; name one with --model.")
    return cards[0]
