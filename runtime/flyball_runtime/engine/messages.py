"""Messages between the API process and the engine process, as tagged msgspec structs in msgpack."""

import msgspec
from msgspec import Struct

from flyball_protocol import LimitsAck, LimitsReport, LimitsUpdate
from flyball_runtime.core.request import Failed, Finished, Request
from flyball_runtime.core.stats import EngineInfo, StepStats


class Submit(Struct, frozen=True, tag=True):
    request: Request


class Abort(Struct, frozen=True, tag=True):
    request_id: str


class PostLimits(Struct, frozen=True, tag=True):
    """``post_id`` comes back in the LimitsAnswer to this post."""

    post_id: int
    update: LimitsUpdate


class Stop(Struct, frozen=True, tag=True):
    """Leave the loop now; whatever still runs is dropped (the client has answered for it)."""


ToEngine = Submit | Abort | PostLimits | Stop


class _RequestId(Struct, frozen=True):
    request_id: str


class Arrival(Struct, frozen=True, tag="Submit"):
    """A Submit of which only the id was decoded."""

    request: _RequestId


class Ready(Struct, frozen=True, tag=True):
    info: EngineInfo
    limits: LimitsReport


class StepOutput(Struct, frozen=True, tag=True):
    """Everything one step produced: ``token_ids[i]`` is the new token of ``request_ids[i]``; endings come after tokens.

    ``num_cached_tokens``: prompt tokens found in the prefix cache, of the requests first admitted in this step that had any.
    Between two steps the engine sends one with endings alone, or with nothing but its state.
    """

    request_ids: list[str]
    token_ids: list[int]
    endings: list[Finished | Failed]
    stats: StepStats
    num_cached_tokens: dict[str, int] = {}


class LimitsAnswer(Struct, frozen=True, tag=True):
    post_id: int
    ack: LimitsAck
    limits: LimitsReport


class LimitsMoved(Struct, frozen=True, tag=True):
    """The limits changed without a post: a lease ran out."""

    limits: LimitsReport


class Died(Struct, frozen=True, tag=True):
    """The engine's last words. ``is_config_error``: start-up was impossible as configured."""

    reason: str
    is_config_error: bool


FromEngine = Ready | StepOutput | LimitsAnswer | LimitsMoved | Died

_encoder = msgspec.msgpack.Encoder()
_submit = msgspec.msgpack.Decoder(Submit)
_head_to_engine = msgspec.msgpack.Decoder(Arrival | Abort | PostLimits | Stop)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_submit(frame: bytes) -> Submit:
    return _submit.decode(frame)


def decode_head_to_engine(frame: bytes) -> Arrival | Abort | PostLimits | Stop:
    """Decode a message, of a Submit no more than its id: the rest takes time in proportion to the prompt."""
    return _head_to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    return _from_engine.decode(frame)
