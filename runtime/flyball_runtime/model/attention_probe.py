"""What a model of transformers asks of attention, seen in one forward pass on the meta device: shapes without memory.

transformers calls attention through an interface that others may implement. The probe implements it to look on: it notes each
call and the mask that it comes with. So windows, scales and sizes are those that the model's code uses, whatever the fields
of config.json are called, and what Flyball's attention cannot do is found before any weights are read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flyball_protocol.quoting import one_line, quoted, quoted_list
from flyball_runtime.core.checkpoint import Checkpoint, ServedModel
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.rope import MAX_POSITIONS

PROBE = "flyball_probe"
NUM_TOKENS = 4

KEY_VALUE_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Classes of transformers' cache that hold keys and values of tokens, and nothing else."""

NOT_FOR_ATTENTION = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"}
)
"""Arguments that reach attention only because models pass all of theirs on."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in a forward pass.

    Attributes:
        module: name of the module that makes it.
        scale: factor on the scores.
        softcap: bound on the scores, or None.
    """

    module: str
    scale: float
    softcap: float | None

    @property
    def layer(self) -> str:
        """Name of the decoder layer that the module is in: up to the first number."""
        parts = self.module.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdigit()]
        return ".".join(parts[: numbers[0] + 1]) if numbers else self.module


@dataclass(frozen=True)
class TransformersModel(ServedModel):
    """A model that transformers implements.

    Attributes:
        calls: of attention, in order: one for each layer.
        context_len: tokens that its positions reach, without a change of rotation on the way.
        num_parameters: tied ones count once.
    """

    calls: tuple[AttentionCall, ...]
    context_len: int
    num_parameters: int

    @property
    def max_context_len(self) -> int:
        return self.context_len


def probe(path: Path) -> TransformersModel:
    """Return what the engine needs to know of a checkpoint that transformers implements.

    Raises:
        ConfigError: transformers has no such model, or Flyball cannot serve it; the message says which and why.
    """
    checkpoint = Checkpoint.from_dir(path)
    config = _read_config(path)
    model_class = _model_class(checkpoint, config)
    _refuse_other_states(model_class, config)
    seen = _Seen()
    seen.listen()
    with _explained(model_class, "cannot be built or run without weights"):
        model = _empty_model(model_class, config)
        _run(model, seen)
    kind = _Checks(model_class.__name__)
    windows = tuple(kind.window(call) for call in seen.calls)
    num_kv_heads, head_dim = kind.sizes(seen.calls)
    kind.one_call_for_each_layer(model, seen)
    kind.logits(seen)
    return TransformersModel(
        architecture=model_class.__name__,
        vocab_size=seen.logits_shape[-1],
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_windows=windows,
        dtype=checkpoint.dtype,
        eos_token_ids=checkpoint.eos_token_ids | _default_eos(config),
        stored=checkpoint.stored,
        calls=tuple(kind.call(model, call) for call in seen.calls),
        context_len=_context_len(path, config),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _read_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its checks raise many types
        raise ConfigError(
            f"transformers {transformers.__version__} cannot read {path / 'config.json'}: {one_line(str(error))} "
            "Code that comes with a checkpoint is not run. Use a model that transformers has."
        ) from error


def _model_class(checkpoint: Checkpoint, config: Any) -> type[PreTrainedModel]:
    """Return the class of the first architecture that is a text decoder. Raises ConfigError if there is none."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ())
    known = (found,) if isinstance(found, str) else tuple(found)
    name = next((name for name in checkpoint.architectures if name in known), None)
    if name is None or config.is_encoder_decoder or config.get_text_config() is not config:
        raise ConfigError(
            f"architecture {quoted_list(checkpoint.architectures)} (model_type {quoted(config.model_type)}) is no "
            f"decoder-only text model of transformers {transformers.__version__}. Encoders and models that also read images "
            "or audio are not served; use a checkpoint whose architectures in config.json name a ...ForCausalLM of its type."
        )
    return getattr(transformers, name)  # type: ignore[no-any-return]


def _refuse_other_states(model_class: type[PreTrainedModel], config: Any) -> None:
    """Raise ConfigError if tokens leave more behind than keys and values, or attention cannot be replaced."""
    name = model_class.__name__
    states = {type(layer).__name__ for layer in DynamicCache(config=config).layers} - set(KEY_VALUE_LAYERS)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if states or model_class._is_stateful:
        what = f"layers of kind {', '.join(sorted(kinds))}" if kinds else "a state of its own"
        raise ConfigError(
            f"{name} has {what}: a hybrid cache. The paged KV cache holds keys and values only. "
            "Use a model in which every layer is full or sliding attention."
        )
    if not model_class._supports_attention_backend:
        raise ConfigError(
            f"{name} does not call attention through transformers' attention interface (it has biases such as ALiBi, or "
            "older code), so it cannot be given the paged KV cache. Use another model."
        )


@contextmanager
def _explained(model_class: type[PreTrainedModel], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the code of any model
        raise ConfigError(
            f"{model_class.__name__} {what} ({type(error).__name__}: {one_line(str(error))}), so what it asks of attention "
            "is unknown. Check config.json, or use another model."
        ) from error


def _empty_model(model_class: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation=PROBE)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the others look at values, of which there are none
    freeze_rotations(model)
    return model.eval()


def freeze_rotations(model: PreTrainedModel) -> None:
    """Keep RoPE as it was built. ``dynamic`` and ``longrope`` would look at all positions of a batch to change it."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):  # by kind of layer
            module.rope_type = dict.fromkeys(rope_type, "default")  # type: ignore[assignment]
        elif rope_type is not None:
            module.rope_type = "default"  # type: ignore[assignment]


@dataclass
class _Call:
    module: torch.nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: "_Mask | None"
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Mask:
    """A mask that was asked for. ``allows`` takes indices of a query and of a key."""

    allows: Callable[..., Tensor]
    local_size: int | None


@dataclass
class _Seen:
    """What a forward pass asked of attention. Masks are told apart by the tensors that stand for them."""

    calls: list[_Call] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, _Mask]] = field(default_factory=dict)
    num_decoders: int = 0
    logits_shape: tuple[int, ...] = ()

    def listen(self) -> None:
        """Make this what models with PROBE attention call."""
        AttentionInterface.register(PROBE, self.attend)
        AttentionMaskInterface.register(PROBE, self.make_mask)

    def make_mask(
        self, *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, local_size: Any = None, **_: Any
    ) -> Tensor:
        mask = torch.empty(batch_size, 1, q_length, kv_length, device="meta")
        self.masks[id(mask)] = mask, _Mask(mask_function, local_size)
        return mask

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        _, mask = self.masks.get(id(attention_mask), (None, None))
        self.calls.append(_Call(module, query.shape, key.shape, value.shape, mask, arguments))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def note_decoder(self, *_: Any) -> None:
        self.num_decoders += 1


@torch.no_grad()
def _run(model: PreTrainedModel, seen: _Seen) -> None:
    noting = model.get_decoder().register_forward_hook(seen.note_decoder)
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    # with a mask, positions are not searched for the starts of sequences, which would need their values
    output = model(
        input_ids=ids,
        position_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        use_cache=False,
        logits_to_keep=ids[0, :1],
    )
    noting.remove()
    seen.logits_shape = tuple(output.logits.shape)


@dataclass(frozen=True)
class _Checks:
    """Raise ConfigError, with the architecture, about what Flyball's attention does not do."""

    architecture: str

    def window(self, call: _Call) -> int | None:
        """Return how many tokens the mask of a call lets each token see."""
        if call.mask is not None:
            window = call.mask.local_size
            if window is None or (isinstance(window, int) and window > 0):
                with _explained_mask(self):
                    if _is_causal(call.mask, window):
                        return window
        raise self._refused("has a mask of its own: tokens do not see all tokens before them, or those in a window")

    def sizes(self, calls: list[_Call]) -> tuple[int, int]:
        """Return the number of KV heads and their size."""
        if not calls:
            raise self._refused("never calls attention")
        (_, heads, _, size) = calls[0].key
        for call in calls:
            if call.key != call.value or call.query[-1] != size:
                sizes = f"{call.query[-1]}, {call.key[-1]} and {call.value[-1]}"
                raise self._refused(f"has heads of {sizes} elements for queries, keys and values, which must be alike")
            if call.key != calls[0].key:
                raise self._refused(
                    f"has layers with keys of {heads} x {size} and of {call.key[1]} x {call.key[-1]} elements"
                )
            if call.query[1] % heads:
                raise self._refused(f"has {call.query[1]} query heads, no multiple of {heads} KV heads")
        return heads, size

    def one_call_for_each_layer(self, model: PreTrainedModel, seen: _Seen) -> None:
        num_layers, num_calls = model.config.num_hidden_layers, len(seen.calls)
        if num_calls != num_layers or len({id(call.module) for call in seen.calls}) != num_layers:
            raise self._refused(f"calls attention {num_calls} times in {num_layers} layers; it must be once in each")

    def logits(self, seen: _Seen) -> None:
        if seen.num_decoders != 1 or seen.logits_shape[:-1] != (1, 1):
            raise self._refused("cannot compute the logits of chosen tokens only")

    def call(self, model: PreTrainedModel, call: _Call) -> AttentionCall:
        """Return what stays the same from call to call."""
        given = {name: value for name, value in call.arguments.items() if value is not None}
        scale = given.pop("scaling", call.query[-1] ** -0.5)
        softcap = given.pop("softcap", None)
        # the mask says which window is in force, as it does to transformers' own eager and SDPA attention
        if given.pop("dropout", 0.0) or not given.pop("is_causal", True):
            raise self._refused("has dropout in attention, or lets tokens see those after them")
        unknown = given.keys() - NOT_FOR_ATTENTION - {"sliding_window", "s_aux"}
        if unknown:
            raise self._refused(f"gives attention {', '.join(sorted(unknown))}, which is not known here")
        if not isinstance(scale, float | int) or not isinstance(softcap, float | int | None):
            raise self._refused("scales attention scores by more than a number")
        (name,) = (name for name, module in model.named_modules() if module is call.module)
        return AttentionCall(name, float(scale), None if softcap is None else float(softcap))

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self.architecture} {why}. Flyball's paged attention cannot serve it; use another model.")


@contextmanager
def _explained_mask(checks: _Checks) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, IndexError, NotImplementedError) as error:
        raise checks._refused(f"has a mask that depends on more than positions ({one_line(str(error))})") from error


def _is_causal(mask: _Mask, window: int | None) -> bool:
    """Return whether the first tokens, and one past the window, see what they should."""
    last = 3 * NUM_TOKENS + 2 * (window or 0)
    keys = torch.arange(last + 1)
    queries = torch.cat((torch.arange(2 * NUM_TOKENS), torch.tensor([last])))[:, None]
    expected = keys <= queries
    if window is not None:
        expected = expected & (keys > queries - window)
    zero = torch.tensor(0)
    return torch.equal(mask.allows(zero, zero, queries, keys).expand_as(expected), expected)


def _default_eos(config: Any) -> frozenset[int]:
    """Return what transformers takes where config.json says nothing."""
    ids = config.eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _context_len(path: Path, config: Any) -> int:
    """Return the tokens that positions reach.

    ``dynamic`` and ``longrope`` rotate otherwise once a sequence is longer than the original context, but keys stay in the
    cache as they were rotated. So the original context is the limit.
    """
    lens = [getattr(config, "max_position_embeddings", None)]
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            lens.append(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    known = [length for length in lens if length is not None]
    if not known or not 1 < min(known) <= MAX_POSITIONS:
        raise ConfigError(
            f"{path / 'config.json'}: max_position_embeddings is {quoted(lens[0])}; it must be a number from 2 to "
            f"{MAX_POSITIONS}."
        )
    return int(min(known))


def _ropes(config: Any) -> list[dict[str, Any]]:
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    return nested or [ropes]
