"""Models that transformers implements, with Flyball's paged attention in place of theirs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers import logging as transformers_logging

from flyball_kernels import kv_cache
from flyball_kernels.backend import Backend
from flyball_kernels.paged_attention import paged_attention
from flyball_protocol.quoting import one_line, quoted_list
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.kv_layout import KVLayout, longest_reach
from flyball_runtime.model.attention_probe import AttentionCall, TransformersModel, freeze_rotations
from flyball_runtime.model.linear import Place
from flyball_runtime.model.transformer import KVTensors, StepInputs

PAGED = "flyball"
"""Name of the paged attention in transformers' attention interface. Without masks: block tables say what is seen."""


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    attention: PagedAttention = module.flyball_attention  # type: ignore[assignment]
    return attention(query, key, value, s_aux), None


AttentionInterface.register(PAGED, _attend)


@dataclass
class _Step:
    """The step under way. Attention looks it up: not every model passes arguments of ours on to it."""

    inputs: StepInputs
    kv: KVTensors
    after_layer: Callable[[], object]


class PagedAttention:
    """Attention of one layer: stores keys and values, then attends to those of each token's sequence."""

    def __init__(self, owner: "TransformersLM", layer: int, call: AttentionCall) -> None:
        self._owner = owner
        self._group, self._tensor = owner.layout.places[layer]
        self._window = owner.config.sliding_windows[layer]
        self._call = call

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Take and return one row with all tokens of the step.

        Args:
            query, key, value: ``[1, heads, num_tokens, head_dim]``.
            sinks: ``[num_q_heads]`` or None.
        Returns:
            ``[1, num_tokens, num_q_heads, head_dim]``, dtype of ``query``.
        """
        step = self._owner.step
        inputs, caches = step.inputs, step.kv[self._tensor]
        dtype = query.dtype if kv_cache.is_rounded(caches[0]) else caches[0].dtype
        query_rows, *new = (one[0].transpose(0, 1).to(dtype) for one in (query, key, value))
        for cache, rows, order in zip(caches, new, kv_cache.orders(self._owner.backend), strict=True):
            kv_cache.write(cache, inputs.slot_mappings[self._group], rows, order)
        attended = paged_attention(
            query_rows.contiguous(),
            *caches,
            inputs.block_tables[self._group],
            inputs.cu_query_lens,
            inputs.context_lens,
            scale=self._call.scale,
            max_query_len=inputs.max_query_len,
            backend=self._owner.backend,
            sliding_window=self._window,
            softcap=self._call.softcap,
            sinks=None if sinks is None else sinks.float().contiguous(),
        )
        return attended.to(query.dtype).unsqueeze(0)


class TransformersLM:
    """A language model of transformers. All sequences of a step are one row of tokens, told apart by their positions.

    Args:
        model: with weights, made with ``PAGED`` attention.
        max_len: longest sequence that will be served.
    """

    layers_at_once = 1
    step: _Step

    def __init__(self, model: PreTrainedModel, config: TransformersModel, backend: Backend, max_len: int) -> None:
        self.config = config
        self.backend = backend
        self.layout = KVLayout.of(config.sliding_windows, max_len)
        self.num_parameters = config.num_parameters
        self._model = model
        self._decoder = model.get_decoder()
        self._decoded: Any = None
        self._decoder.register_forward_hook(self._keep_decoded)
        for layer, call in enumerate(config.calls):
            model.get_submodule(call.module).flyball_attention = PagedAttention(self, layer, call)  # type: ignore[assignment]
            model.get_submodule(call.layer).register_forward_hook(self._tell_progress)

    @torch.inference_mode()
    def forward(
        self,
        inputs: StepInputs,
        kv: KVTensors,
        after_layer: Callable[[], object] = lambda: None,
        score: Callable[[Callable[[Tensor], Tensor]], object] | None = None,
        pool: Callable[[Callable[[Tensor], Tensor]], object] | None = None,
    ) -> Tensor:
        """Run one step; see ``CausalLM.forward``."""
        self.step = _Step(inputs, kv, after_layer)
        logits = self._logits(inputs.logits_indices)
        if score is not None:
            with self._decoded_once():
                score(self._logits)
        if pool is not None:
            pool(lambda wanted: self._decoded[0][0, wanted])
        self._decoded = None
        return logits

    def timed_parts(
        self, inputs: StepInputs, kv: KVTensors, num_rows: int
    ) -> tuple[Callable[[], object], Callable[[], Tensor]]:
        """Return the layer that takes longest, and the head for some rows; see ``CausalLM.timed_parts``."""
        self.step = _Step(inputs, kv, lambda: None)
        layer = self._model.get_submodule(self.config.calls[longest_reach(self.config.sliding_windows)].layer)
        given: list[tuple[Any, Any]] = []
        noting = layer.register_forward_pre_hook(lambda _, *arguments: given.append(arguments), with_kwargs=True)
        rows = torch.arange(num_rows, device=inputs.positions.device)
        self._logits(rows)
        noting.remove()
        ((args, kwargs),) = given

        def head() -> Tensor:
            with self._decoded_once():
                return self._logits(rows)

        return lambda: layer(*args, **kwargs), head

    def _logits(self, wanted: Tensor) -> Tensor:
        """Return ``[len(wanted), vocab_size]`` fp32 of those of the step's tokens."""
        inputs = self.step.inputs
        output = self._model(
            input_ids=inputs.token_ids.unsqueeze(0),
            position_ids=inputs.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=wanted,
        )
        return output.logits[0].float()

    def _tell_progress(self, *_: object) -> None:
        self.step.after_layer()

    def _keep_decoded(self, _module: object, _args: object, output: Any) -> None:
        self._decoded = output

    @contextmanager
    def _decoded_once(self) -> Iterator[None]:
        """Have the decoder return what it returned last: the rest of the model's forward then makes logits of it."""
        self._decoder.forward = lambda *_, **__: self._decoded  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del self._decoder.forward


def load_transformers_model(path: Path, config: TransformersModel, place: Place, max_len: int) -> TransformersLM:
    """Build the model and fill it; transformers streams the weights from the mapped files.

    Raises:
        ConfigError: weights are missing, unexpected or of the wrong shape, or tokens of a sequence reach another one.
    """
    transformers_logging.disable_progress_bar()
    try:
        model, loading = getattr(transformers, config.architecture).from_pretrained(
            path,
            dtype=place.dtype,
            attn_implementation=PAGED,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # told apart below, by name
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"transformers cannot load {path}: {one_line(str(error))} Check the files.") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            names = quoted_list(sorted(map(str, loading[kind])))
            raise ConfigError(
                f"{path} does not fit {config.architecture}: {kind.replace('_', ' ')} {names}. "
                "Check that config.json and the weights belong together."
            )
    freeze_rotations(model)
    loaded = TransformersLM(model.eval().to(place.device), config, place.backend, max_len)
    _refuse_leaks(loaded, model, place)
    return loaded


BLOCK_SIZE, LEN = 8, 4


@torch.inference_mode()
def _refuse_leaks(loaded: TransformersLM, model: PreTrainedModel, place: Place) -> None:
    """Run three sequences of LEN tokens, the one in the middle with NaN for embeddings. The others must not notice.

    Raises:
        ConfigError: they did, so layers mix tokens elsewhere than in attention (convolutions, shifts, recurrence).
    """
    config = loaded.config
    shape = (3, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
    device = place.device

    def zeros() -> Tensor:
        return torch.zeros(shape, dtype=place.dtype, device=device)

    kv = [(zeros(), zeros()) for _ in range(loaded.layout.num_tensors)]
    inputs = _three_sequences(len(loaded.layout.groups), config.vocab_size, device)
    middle = torch.arange(LEN, 2 * LEN, device=device)
    sound = loaded.forward(inputs, kv).isfinite().all(dim=1)
    poisoning = model.get_input_embeddings().register_forward_hook(
        lambda _module, _args, embedded: embedded.index_fill(1, middle, float("nan"))
    )
    reached = ~loaded.forward(inputs, kv).isfinite().all(dim=1)
    poisoning.remove()
    if (sound & reached).index_fill(0, middle, False).any():
        raise ConfigError(
            f"{config.architecture} mixes tokens outside of attention, so sequences of a batch would disturb each other. "
            "Use a model whose layers exchange nothing between tokens but in attention."
        )


def _three_sequences(num_groups: int, vocab_size: int, device: torch.device) -> StepInputs:
    def on(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    positions, sequences = torch.arange(LEN).repeat(3), torch.arange(3)
    slots = on(sequences.repeat_interleave(LEN) * BLOCK_SIZE + positions)
    ends = on(torch.arange(0, 3 * LEN + 1, LEN, dtype=torch.int32))
    return StepInputs(
        token_ids=on(torch.arange(3 * LEN) % vocab_size),
        positions=on(positions),
        slot_mappings=(slots,) * num_groups,
        block_tables=(on(sequences[:, None].int()),) * num_groups,
        cu_query_lens=ends,
        context_lens=on(torch.full((3,), LEN, dtype=torch.int32)),
        logits_indices=on(torch.arange(3 * LEN)),
        cu_logits_lens=ends,
        max_query_len=LEN,
        max_logits_len=LEN,
        max_context_len=LEN,
    )
