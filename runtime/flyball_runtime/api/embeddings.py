"""/v1/embeddings and /v1/score: prompts whose hidden states are pooled, and nothing is sampled."""

import asyncio
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from fastapi import Request, Response

from flyball_protocol.quoting import quoted
from flyball_runtime.api.errors import ClientLeft, json_response
from flyball_runtime.api.generation import CheckedRequest, Generation, TokenUsage
from flyball_runtime.api.identity import client_of
from flyball_runtime.api.schemas import RequestFields, texts_or_ids, urgency_of, without_noops
from flyball_runtime.api.server import Json, Server, convert
from flyball_runtime.core.errors import EmptyPrompt, InvalidRequest, UnfitPrompt
from flyball_runtime.core.request import Prompt, validate_cache_salt, validate_deadlines
from flyball_runtime.core.sampling_params import SamplingParams

Vectors = np.ndarray
"""``[num_prompts, size]`` float64."""

EMBEDDING_NOOPS: dict[str, tuple[Any, ...]] = {
    "messages": (None,),
    "truncate_prompt_tokens": (None,),
    "normalize": (None, True),
    "use_activation": (None, True),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
}
SCORE_NOOPS: dict[str, tuple[Any, ...]] = {"truncate_prompt_tokens": (None,), "use_activation": (None, True)}

Texts = str | list[str]


class PooledRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests for embeddings and for scores have in common.

    Attributes:
        add_special_tokens: let the tokenizer add its own (BOS); the default is yes.
    """

    add_special_tokens: bool | None = None


class EmbeddingRequest(PooledRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts to make embeddings of.

    Attributes:
        input: a text, token ids, or a list of texts or of lists of token ids.
        encoding_format: ``base64`` is of 32-bit floats, little-endian; it is shorter.
        dimensions: cut each vector to so many entries, if the model was trained for that.
    """

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class ScoreRequest(PooledRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to compare, under the names that vLLM had first.

    Attributes:
        text_1: a text, or as many texts as ``text_2`` has.
        text_2: a text, or a list of texts.
    """

    sides: ClassVar = ("text_1", "text_2")

    text_1: Texts
    text_2: Texts


class ScoreDocumentsRequest(PooledRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to compare.

    Attributes:
        queries: a text, or as many texts as ``documents`` has.
        documents: a text, or a list of texts.
    """

    sides: ClassVar = ("queries", "documents")

    queries: Texts
    documents: Texts


class ScoreDataRequest(PooledRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to compare, under another pair of names.

    Attributes:
        data_1: a text, or as many texts as ``data_2`` has.
        data_2: a text, or a list of texts.
    """

    sides: ClassVar = ("data_1", "data_2")

    data_1: Texts
    data_2: Texts


ScoreKind = type[ScoreRequest] | type[ScoreDocumentsRequest] | type[ScoreDataRequest]
SCORE_KINDS: tuple[ScoreKind, ...] = (ScoreRequest, ScoreDocumentsRequest, ScoreDataRequest)


class PromptsToPool(NamedTuple):
    """A body, its prompts, and what makes data of their vectors."""

    body: PooledRequest
    prompts: list[Prompt]
    data: Callable[[Vectors], list[dict[str, Any]]]
    adapter: int | None


class EmbeddingRoutes:
    """The endpoints that generate nothing."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def embeddings(self, request: Request) -> Response:
        return await self._answer(request, self._embeddings, "embd-")

    async def score(self, request: Request) -> Response:
        return await self._answer(request, self._score, "score-")

    async def _answer(self, request: Request, understand: Callable[[Json], PromptsToPool], prefix: str) -> Response:
        arrival_s, understood = await self._server.read_to_queue(request, understand)
        call = self._call(request, understood, arrival_s)
        frame = {
            "id": prefix + call.unique,
            "object": "list",
            "created": int(time.time()),
            "model": understood.body.model or self._server.settings.model_name,
        }
        generation = Generation(call, self._server.front, self._server.measured, self._server.codec)
        async with generation.running(request.receive):
            await generation.wait_all()
            if generation.disconnected:
                raise ClientLeft
            pooled = [choice.pooled for choice in generation.choices]
            return await asyncio.to_thread(
                _whole, pooled, understood, frame | {"usage": _pooling_usage(generation.usage)}
            )

    def _embeddings(self, fields: Json) -> PromptsToPool:
        self._check_prompt(fields, "input")
        known = without_noops(fields, EmbeddingRequest.__struct_fields__, EMBEDDING_NOOPS)
        body = convert(known, EmbeddingRequest)
        texts, ids = texts_or_ids("input", body.input)
        self._check(body, "input", len(texts) + len(ids))
        dimensions = self._dimensions(body.dimensions)
        ids = ids or self._ids(body, "input", texts)
        is_base64 = body.encoding_format == "base64"
        return self._to_pool(body, "input", ids, lambda vectors: _embedding_data(vectors[:, :dimensions], is_base64))

    def _score(self, fields: Json) -> PromptsToPool:
        kind = next((one for one in SCORE_KINDS if not fields.keys().isdisjoint(one.sides)), ScoreRequest)
        for side in kind.sides:
            self._check_prompt(fields, side)
        body = convert(without_noops(fields, kind.__struct_fields__, SCORE_NOOPS), kind)
        one, other = (_listed(side, getattr(body, side)) for side in kind.sides)
        if len(one) not in (1, len(other)):
            raise InvalidRequest(
                f"{kind.sides[0]} has {len(one)} texts and {kind.sides[1]} has {len(other)}. Send one text and any number "
                "of others, or as many of both.",
                param=kind.sides[0],
            )
        self._check(body, kind.sides[1], len(one) + len(other))
        ids = [
            ids for side, texts in zip(kind.sides, (one, other), strict=True) for ids in self._ids(body, side, texts)
        ]
        num = len(one)
        return self._to_pool(body, kind.sides[1], ids, lambda vectors: _score_data(vectors[:num], vectors[num:]))

    def _check_prompt(self, fields: Json, param: str) -> None:
        with _at(param):
            self._server.check_prompt(fields.get(param), param)

    def _check(self, body: PooledRequest, param: str, num_prompts: int) -> None:
        """Refuse what can be refused before any prompt is tokenized."""
        self._server.check_model(body.model)
        validate_cache_salt(body.cache_salt)
        validate_deadlines(body.ttft_deadline_ms, body.e2e_deadline_ms)
        settings = self._server.settings
        self._server.check_count(param, num_prompts, min(settings.max_prompts, settings.max_choices))

    def _dimensions(self, dimensions: int | None) -> int | None:
        """Return to how many entries vectors are cut. Raises InvalidRequest."""
        embedder = self._server.settings.embedder
        if dimensions is None or embedder.takes(dimensions):
            return dimensions
        if embedder.dimensions is None:
            allowed = f"it may be 1 to {embedder.size}"
        elif embedder.dimensions:
            allowed = f"this model was trained for {', '.join(map(str, embedder.dimensions))}"
        else:
            allowed = f"this model was not trained to be cut from {embedder.size}, and a part of a vector says little"
        raise InvalidRequest(f"dimensions is {quoted(dimensions)}; {allowed}. Leave it out.", param="dimensions")

    def _ids(self, body: PooledRequest, param: str, texts: list[str]) -> list[list[int]]:
        with _at(param):
            ids = self._server.codec.encode(
                texts,
                add_special_tokens=body.add_special_tokens is not False,
                max_tokens=self._server.engine_info().max_model_len,
            )
            if not all(ids):
                raise EmptyPrompt
            return ids

    def _to_pool(
        self, body: PooledRequest, param: str, ids: list[list[int]], data: Callable[[Vectors], list[dict[str, Any]]]
    ) -> PromptsToPool:
        adapter = self._server.adapter_of(body.model)
        with _at(param):
            prompts = self._server.front.prepare(ids, 1, body.cache_salt, adapter)
        return PromptsToPool(body, prompts, data, adapter)

    def _call(self, request: Request, understood: PromptsToPool, arrival_s: float) -> CheckedRequest:
        return CheckedRequest(
            request_id=request.state.request_id,
            unique=uuid.uuid4().hex,
            arrival_s=arrival_s,
            prompts=understood.prompts,
            sampling=SamplingParams(),
            num_choices=1,
            urgency=urgency_of(understood.body, request.headers),
            client=client_of(request),
            cache_salt=understood.body.cache_salt,
            pooling=self._server.settings.embedder.pooling,
            adapter=understood.adapter,
        )


@contextmanager
def _at(param: str) -> Iterator[None]:
    """Have errors about prompts name this field."""
    try:
        yield
    except UnfitPrompt as error:
        error.param = param
        raise


def _listed(param: str, texts: Texts) -> list[str]:
    if not texts and isinstance(texts, list):
        raise InvalidRequest(f"{param} is an empty list. Send a text, or some.", param=param)
    return [texts] if isinstance(texts, str) else texts


def _pooling_usage(usage: TokenUsage) -> dict[str, Any]:
    """Return OpenAI's usage of embeddings, which has no completion_tokens."""
    return {
        "prompt_tokens": usage.num_prompt,
        "total_tokens": usage.num_prompt,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


def _whole(pooled: list[bytes], understood: PromptsToPool, frame: dict[str, Any]) -> Response:
    """The answer, in time that grows with the number and the size of the vectors: 1 ms for 10,000 entries."""
    vectors = np.stack([np.frombuffer(one, np.float32) for one in pooled]).astype(np.float64)
    return json_response(frame | {"data": understood.data(vectors)})


def unit(vectors: Vectors) -> Vectors:
    """Scale each vector to length 1; one of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths == 0.0, 1.0, lengths)


def _embedding_data(vectors: Vectors, is_base64: bool) -> list[dict[str, Any]]:
    rows = unit(vectors).astype("<f4")
    made = [b64encode(row.tobytes()).decode() if is_base64 else row.tolist() for row in rows]
    return [{"index": index, "object": "embedding", "embedding": one} for index, one in enumerate(made)]


def _score_data(one: Vectors, other: Vectors) -> list[dict[str, Any]]:
    """The cosines of pairs. ``one`` may be a single vector, which is compared with all of the others."""
    cosines = (unit(one) * unit(other)).sum(axis=1).tolist()
    return [{"index": index, "object": "score", "score": cosine} for index, cosine in enumerate(cosines)]
