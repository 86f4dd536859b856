"""/openapi.json, built from the types that validate requests."""

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from flyball_protocol import endpoints
from flyball_runtime import __version__
from flyball_runtime.api import adapters, answers, anthropic_messages, embeddings, responses, schemas
from flyball_runtime.api.keys import OPEN_PATHS
from flyball_runtime.api.settings import ApiSettings
from flyball_runtime.core import sampling_params as sampling
from flyball_runtime.core.embedder import Embedder
from flyball_runtime.core.lora import MAX_NAME_CHARS
from flyball_runtime.core.request import MAX_CACHE_SALT_CHARS, MAX_DEADLINE_MS

Schema = dict[str, Any]

_ERRORS = {
    400: "A field, a header or the body is wrong; the message says how.",
    401: "No valid API key.",
    403: "Adapters cannot be loaded here while the server runs.",
    404: "No such model or adapter.",
    408: "The body took too long.",
    413: "The body is too long.",
    429: "Too many requests wait.",
    500: "The engine stopped, or a bug.",
    503: "The model loads, the replica drains, or it has no room for the body.",
}
_BODY_ERRORS = (400, 404, 408, 413, 429, 500, 503)


TEXT_FORMATS = ("text/plain", "application/openmetrics-text")
"""Of metrics; the Accept header chooses."""


_KEY_SCHEMES: dict[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
"""How a request may bring its key; one of them is enough."""


class Operation(NamedTuple):
    """One method of one path.

    Attributes:
        bodies: kinds of the request body, one of which it must be.
        answer: kind of the answer, or its media types if it is no JSON.
        chunk: kind of the events of a stream.
        has_done: whether ``[DONE]`` ends it.
        error: kind of the answers that are no success.
    """

    path: str
    method: str
    summary: str
    answer: type | tuple[str, ...]
    bodies: tuple[type, ...] = ()
    errors: tuple[int, ...] = (400, 500, 503)
    chunk: type | None = None
    has_done: bool = True
    error: type = answers.Error


OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "post",
        "Answer a chat.",
        answers.ChatAnswer,
        (schemas.ChatRequest,),
        _BODY_ERRORS,
        answers.ChatChunk,
    ),
    Operation(
        "/v1/completions",
        "post",
        "Complete prompts.",
        answers.CompletionAnswer,
        (schemas.CompletionRequest,),
        _BODY_ERRORS,
        answers.CompletionAnswer,
    ),
    Operation(
        "/v1/responses",
        "post",
        "Answer a conversation, without storing it.",
        answers.ResponseAnswer,
        (responses.ResponseRequest,),
        _BODY_ERRORS,
        answers.ResponseEvent,
        has_done=False,
    ),
    Operation(
        "/v1/messages",
        "post",
        "Answer a conversation in Anthropic's form.",
        answers.MessageAnswer,
        (anthropic_messages.MessagesRequest,),
        _BODY_ERRORS,
        answers.MessageEvent,
        has_done=False,
        error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "Count the tokens of a conversation in Anthropic's form.",
        answers.TokenCount,
        (anthropic_messages.TokenCountRequest,),
        _BODY_ERRORS,
        error=answers.MessageError,
    ),
    Operation(
        "/v1/embeddings",
        "post",
        "Make embeddings of prompts.",
        answers.EmbeddingList,
        (embeddings.EmbeddingRequest,),
        _BODY_ERRORS,
    ),
    Operation(
        "/v1/score",
        "post",
        "Compare texts by their embeddings.",
        answers.ScoreList,
        embeddings.SCORE_KINDS,
        _BODY_ERRORS,
    ),
    Operation("/v1/models", "get", "List the served models.", answers.ModelList),
    Operation("/v1/models/{model}", "get", "Describe a served model.", answers.ModelCard, errors=(400, 404, 500, 503)),
    Operation(
        "/v1/load_lora_adapter",
        "post",
        "Load a LoRA adapter.",
        ("text/plain",),
        (adapters.LoadRequest,),
        (*_BODY_ERRORS, 403),
    ),
    Operation(
        "/v1/unload_lora_adapter",
        "post",
        "Take no more requests for a LoRA adapter.",
        ("text/plain",),
        (adapters.UnloadRequest,),
        (*_BODY_ERRORS, 403),
    ),
    Operation(
        "/tokenize",
        "post",
        "Turn a text or a chat into token ids.",
        answers.Tokens,
        (schemas.TokenizeTextRequest, schemas.TokenizeChatRequest),
        _BODY_ERRORS,
    ),
    Operation(
        "/detokenize",
        "post",
        "Turn token ids into a text.",
        answers.DetokenizedText,
        (schemas.DetokenizeRequest,),
        _BODY_ERRORS,
    ),
    Operation(endpoints.LIVEZ_PATH, "get", "Tell whether the engine makes progress.", answers.Status),
    Operation(endpoints.READYZ_PATH, "get", "Tell whether requests are taken.", answers.Status),
    Operation(endpoints.HEALTH_PATH, "get", "The same as /readyz.", answers.Status),
    Operation(endpoints.METRICS_PATH, "get", "Metrics for Prometheus.", TEXT_FORMATS, errors=(400,)),
)

_NOOPS: dict[type, dict[str, tuple[Any, ...]]] = {
    schemas.ChatRequest: schemas.CHAT_NOOPS,
    schemas.CompletionRequest: schemas.COMPLETION_NOOPS,
    responses.ResponseRequest: responses.RESPONSE_NOOPS | responses.STATELESS,
    anthropic_messages.MessagesRequest: anthropic_messages.MESSAGE_NOOPS,
    anthropic_messages.TokenCountRequest: anthropic_messages.MESSAGE_NOOPS,
    adapters.LoadRequest: adapters.LOAD_NOOPS,
    adapters.UnloadRequest: adapters.UNLOAD_NOOPS,
    embeddings.EmbeddingRequest: embeddings.EMBEDDING_NOOPS,
    embeddings.ScoreRequest: embeddings.SCORE_NOOPS,
    embeddings.ScoreDocumentsRequest: embeddings.SCORE_NOOPS,
    embeddings.ScoreDataRequest: embeddings.SCORE_NOOPS,
}
"""Fields that are let through with these values only, by the kind of request that they may be sent with."""


def document(settings: ApiSettings, *, needs_key: bool) -> Schema:
    """Return the OpenAPI document of a server with these settings."""
    kinds = {
        kind for one in OPERATIONS for kind in (*one.bodies, one.answer, one.chunk, one.error) if isinstance(kind, type)
    }
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for kind in _structs():
        if kind.__name__ in components:
            _complete(components[kind.__name__], kind, settings)
    paths: Schema = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, needs_key)
    security = {"securitySchemes": _KEY_SCHEMES} if needs_key else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Flyball", "version": __version__, "description": "A served model."},
        "paths": paths,
        "components": {"schemas": components, **security},
    }


def _structs(parent: type[msgspec.Struct] = msgspec.Struct) -> Iterator[type[msgspec.Struct]]:
    """Yield the kinds of this package."""
    for kind in type.__subclasses__(parent):
        if kind.__module__.startswith(answers.__name__.rpartition(".")[0]):
            yield kind
        yield from _structs(kind)


def _complete(schema: Schema, kind: type[msgspec.Struct], settings: ApiSettings) -> None:
    """Add what the type does not say: each field's meaning and bounds, and fields that ask for nothing."""
    text = inspect.cleandoc(kind.__doc__ or "")
    schema["description"] = text.partition("Attributes:")[0].strip()
    if not schema["description"]:
        del schema["description"]
    meanings = dict(_meanings(kind))
    bounds = {} if kind.__module__ == answers.__name__ else _bounds(settings)
    if kind is schemas.CompletionRequest:
        bounds["logprobs"] = bounds["top_logprobs"]  # in a chat it is a switch
        bounds["max_tokens"] = {"minimum": 0}  # with echo
    if kind is embeddings.EmbeddingRequest:
        bounds |= {"input": bounds["prompt"], "dimensions": _dimensions(settings.embedder)}
    for name, field in schema["properties"].items():
        if name in meanings:
            field["description"] = meanings[name]
        field |= bounds.get(name, {})
    if kind in _NOOPS:
        known = dict(schema["properties"])
        asks_nothing = {
            name: {"enum": list(values), "description": "Other values are refused."}
            for name, values in _NOOPS[kind].items()
        }
        ignored = {name: {"description": "Ignored."} for name in sorted(schemas.IGNORED_HINTS)}
        schema["properties"] = ignored | asks_nothing | known


def _meanings(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the fields that docstrings explain, and how; the last of a field counts."""
    for one in (sampling.SamplingParams, *reversed(kind.__mro__)):
        explained = inspect.cleandoc(one.__doc__ or "").partition("Attributes:")[2]
        for names, text in re.findall(r"^ {0,4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", explained, flags=re.MULTILINE):
            for name in names.split(", "):
                yield name, " ".join(text.split())


def _bounds(settings: ApiSettings) -> dict[str, Schema]:
    """Return what a value must keep to, by field, in JSON Schema's words."""
    penalty = {"minimum": -sampling.MAX_PENALTY, "maximum": sampling.MAX_PENALTY}
    deadline = {"exclusiveMinimum": 0, "maximum": MAX_DEADLINE_MS}
    text = {"minLength": 1, "maxLength": sampling.MAX_STOP_STRING_CHARS}
    stop = (
        {"type": "string", **text},
        {"type": "array", "items": {"type": "string", **text}, "maxItems": sampling.MAX_STOP_STRINGS},
    )
    token_id = {"type": "integer", "minimum": 0}
    texts = {"minItems": 1, "maxItems": settings.max_prompts}
    choices = {"minimum": 1, "maximum": settings.max_choices}
    biases = {"maxProperties": sampling.MAX_LOGIT_BIASES, "propertyNames": {"pattern": "^[0-9]{1,10}$"}}
    return {
        "model": {"examples": list(settings.served_model_names)},
        "max_tokens": {"minimum": 1},
        "max_completion_tokens": {"minimum": 1},
        "max_output_tokens": {"minimum": 1},
        "temperature": {"minimum": 0, "maximum": 2},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1},
        "min_p": {"minimum": 0, "maximum": 1},
        "seed": {"minimum": -sampling.MAX_SEED - 1, "maximum": sampling.MAX_SEED},
        "stop": {"anyOf": [*stop, {"type": "null"}]},
        "stop_token_ids": {"maxItems": sampling.MAX_STOP_TOKEN_IDS, "items": token_id},
        "min_tokens": {"minimum": 0},
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": {"minimum": sampling.MIN_REPETITION_PENALTY, "maximum": sampling.MAX_REPETITION_PENALTY},
        "logit_bias": biases,
        "bad_words": {"maxItems": sampling.MAX_BAD_WORDS},
        "allowed_token_ids": {"minItems": 1, "items": token_id},
        "tokens": {"items": token_id},
        "n": choices,
        "best_of": choices,
        "top_logprobs": {"minimum": 0, "maximum": sampling.MAX_LOGPROBS},
        "prompt_logprobs": {"minimum": 0, "maximum": sampling.MAX_LOGPROBS},
        "ttft_deadline_ms": deadline,
        "e2e_deadline_ms": deadline,
        "cache_salt": {"minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS},
        "prompt": {"minItems": 1, "items": {"minimum": 0, "items": token_id}},
        "messages": {"minItems": 1, "maxItems": settings.max_messages},
        **{side: texts for kind in embeddings.SCORE_KINDS for side in kind.sides},
        "include_obfuscation": {"enum": [None, False]},
        "lora_name": {"minLength": 1, "maxLength": MAX_NAME_CHARS},
    }


def _dimensions(embedder: Embedder) -> Schema:
    if embedder.dimensions is None:
        return {"minimum": 1, "maximum": embedder.size}
    return {"enum": [None, *sorted({*embedder.dimensions, embedder.size})]}


def _operation(operation: Operation, needs_key: bool) -> Schema:
    checked = needs_key and operation.path not in OPEN_PATHS
    errors = sorted({*operation.errors, *([401] if checked else [])})
    made: Schema = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", operation.path).strip("_"),
        "parameters": _parameters(operation),
        "responses": {
            "200": _success(operation),
            **{str(status): _error(status, operation.error) for status in errors},
        },
    }
    if operation.bodies:
        kinds = [_reference(kind) for kind in operation.bodies]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if checked:
        made["security"] = [{name: []} for name in _KEY_SCHEMES]
    return made


def _parameters(operation: Operation) -> list[Schema]:
    request_id = {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"}
    found: list[Schema] = [{"name": "X-Request-Id", "in": "header", "schema": request_id}]
    if "{model}" in operation.path:
        found.append({"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if any(issubclass(kind, schemas.RequestFields) for kind in operation.bodies):
        limit = schemas.MAX_PRIORITY
        milliseconds = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_MS}
        found += [
            {
                "name": "X-Priority",
                "in": "header",
                "schema": {"type": "integer", "minimum": -limit, "maximum": limit - 1},
            },
            {"name": "X-TTFT-Deadline-Ms", "in": "header", "schema": milliseconds},
            {"name": "X-E2E-Deadline-Ms", "in": "header", "schema": milliseconds},
        ]
    return found


def _success(operation: Operation) -> Schema:
    if isinstance(operation.answer, tuple):
        return {
            "description": "Text.",
            "content": {media: {"schema": {"type": "string"}} for media in operation.answer},
        }
    content: Schema = {"application/json": {"schema": _reference(operation.answer)}}
    description = inspect.cleandoc(operation.answer.__doc__ or "")
    if operation.chunk is not None:
        done = ", then [DONE]" if operation.has_done else ""
        description += f" With stream, events with a {operation.chunk.__name__} each{done}."
        content["text/event-stream"] = {"schema": _event(operation)}
    return {"description": description, "content": content}


def _event(operation: Operation) -> Schema:
    """Return the schema of one server-sent event."""
    kinds = [
        {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(kind)}
        for kind in (operation.chunk, operation.error)
        if kind is not None
    ]
    done: list[Schema] = [{"const": "[DONE]"}] if operation.has_done else []
    event = {"enum": ["message", "error"]} if operation.has_done else {"type": "string"}
    properties = {"event": event, "data": {"anyOf": [*done, *kinds]}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _error(status: int, kind: type) -> Schema:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": _reference(kind)}}}


def _reference(kind: type) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
