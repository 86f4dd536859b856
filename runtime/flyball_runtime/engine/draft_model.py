"""A smaller model that guesses tokens, which the served model then verifies in the same step."""

import logging
import time
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from flyball_protocol.quoting import one_line
from flyball_runtime.core.checkpoint import DType, KVDType, ServedModel
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields, read_json_object
from flyball_runtime.engine.engine import Progress
from flyball_runtime.engine.physical_pool import make_pool
from flyball_runtime.engine.rows import Rows, entries_of
from flyball_runtime.model.hub import resolve_model_path
from flyball_runtime.model.loader import (
    KV_TORCH_DTYPES,
    TORCH_DTYPES,
    Backend,
    check_attention,
    describe_model,
    load_model,
)
from flyball_runtime.model.sampler import SamplingTensors
from flyball_runtime.model.transformer import KVTensors
from flyball_runtime.scheduler import BatchPlan

logger = logging.getLogger(__name__)


class DraftModel:
    """Computes every token that the served model computes, into keys and values of its own at the same places.

    So block tables, prefix cache, preemption and moved blocks are one for both: what a block says of the served model it says
    of this one too. A guess is drawn with the settings, seed and position of the token that it stands for, as the served model
    draws that token: where the two distributions are alike, so are the two tokens, whatever the temperature.

    Args:
        model: directory of a Hugging Face checkpoint, or a Hugging Face id.
        served: what it drafts for, and ``served_path`` the directory of its checkpoint.
        backend: that of the served model.
    Raises:
        ConfigError: it cannot be loaded, or does not fit the served model.

    Attributes:
        model: it is loaded.
        kv_bytes_per_token: what a token takes in its KV tensors.
        drafting_s: seconds that the latest ``fill`` took beyond its first pass, which every step has.
    """

    def __init__(
        self,
        model: str,
        served: ServedModel,
        *,
        served_path: Path,
        dtype: DType,
        kv_dtype: KVDType,
        device: torch.device,
        backend: Backend,
        max_model_len: int,
    ) -> None:
        path = resolve_model_path(model)
        self._config = describe_model(path, "auto")
        _check_fit(model, self._config, served, max_model_len)
        _check_vocabulary(model, path, served_path)
        self._kv_dtype = KV_TORCH_DTYPES[kv_dtype]
        check_attention(backend, self._config, TORCH_DTYPES[dtype], self._kv_dtype)
        self._device = device
        self.model = load_model(
            path,
            self._config,
            dtype=TORCH_DTYPES[dtype],
            device=device,
            backend=backend,
            max_model_len=max_model_len,
        )
        self.drafting_s = 0.0
        self.kv_bytes_per_token = self.model.layout.num_tensors * self._config.kv_bytes_per_layer(kv_dtype)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the KV tensors."""
        self._pool = make_pool(
            self._config,
            self.model.layout.num_tensors,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self._kv_dtype,
            device=self._device,
        )

    @property
    def kv_tensors(self) -> KVTensors:
        """They lie in the blocks of the served model, whose copies are copies of these too."""
        return self._pool.tensors

    def resize(self, num_blocks: int) -> None:
        self._pool.resize(num_blocks)

    def fill(self, plan: BatchPlan, rows: Rows, sampling: SamplingTensors, on_progress: Progress) -> BatchPlan:
        """Compute a plan's tokens, and return the plan with the drafts in place. ``rows.apply`` and copies of blocks come
        before.

        The rows' last tokens are overwritten with drafts, until the step's own are known.
        """
        logits = self._forward(_without_drafts(plan), rows, on_progress)
        self.drafting_s = 0.0
        if not plan.num_drafts:
            return plan
        started_s = self._now_s()
        drafts = self._draft(plan, logits, rows, sampling, on_progress)
        self.drafting_s = self._now_s() - started_s
        return _with_drafts(plan, drafts)

    def _draft(
        self, plan: BatchPlan, logits: Tensor, rows: Rows, sampling: SamplingTensors, on_progress: Progress
    ) -> np.ndarray:
        """Return ``[num_drafted, most]`` drafts, of which each sequence wants as many as the plan says.

        Args:
            logits: behind the last tokens of those sequences.
        """
        num_plain, num_drafts = len(plan.rows) - len(plan.num_drafts), np.array(plan.num_drafts)
        drafted, ends = np.array(plan.rows[num_plain:]), np.array(plan.starts[num_plain:]) + 1
        drafts = np.zeros((len(num_drafts), num_drafts.max()), np.uint32)
        for at in range(num_drafts.max()):
            wanting = num_drafts > at
            token_ids = sampling.sample(logits, drafted[wanting], ends[wanting] + at)
            rows.remember(drafted[wanting].tolist(), token_ids)
            drafts[wanting, at] = token_ids.clamp(min=0).cpu().numpy()
            # the last one is computed too: it may be accepted
            step = _decodes(drafted[wanting], ends[wanting] + at, num_drafts[wanting] > at + 1)
            logits = self._forward(step, rows, on_progress)
        return drafts

    def _now_s(self) -> float:
        """Return the time at which all that was launched is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    def _forward(self, plan: BatchPlan, rows: Rows, on_progress: Progress) -> Tensor:
        return self.model.forward(rows.inputs(plan, entries_of(plan)), self._pool.tensors, on_progress)


def _check_fit(model: str, config: ServedModel, served: ServedModel, max_model_len: int) -> None:
    """Raise ConfigError if a model cannot draft for another one."""
    name = f"model in --speculative-config ({one_line(model)})"
    if config.vocab_size != served.vocab_size:
        raise ConfigError(
            f"{name} has a vocabulary of {config.vocab_size} tokens, and the served model one of {served.vocab_size}. "
            "Take a draft model of the same family, whose tokens are the same."
        )
    if config.max_context_len < max_model_len:
        raise ConfigError(
            f"{name} takes {config.max_context_len} tokens, and --max-model-len is {max_model_len}. "
            "Lower the flag, or take another draft model."
        )
    for who, windows in ((name, config.sliding_windows), ("the served model", served.sliding_windows)):
        if any(window is not None and window < max_model_len for window in windows):
            raise ConfigError(
                f"{who} has sliding windows, and draft models work only without. Use the method ngram, or a "
                "--max-model-len within the windows."
            )


def _check_vocabulary(model: str, path: Path, served_path: Path) -> None:
    """Raise ConfigError if the same number stands for different tokens. Special tokens may differ."""
    draft, served = _vocabulary(path), _vocabulary(served_path)
    if draft is None or served is None:
        logger.warning(
            "the vocabulary of the draft model %s is not compared: there is no tokenizer.json", one_line(model)
        )
    elif draft != served:
        raise ConfigError(
            f"model in --speculative-config ({one_line(model)}) has other tokens than the served model: "
            f"{path}/tokenizer.json and {served_path}/tokenizer.json number them differently. "
            "Take a draft model of the same family."
        )


def _vocabulary(path: Path) -> object:
    """Return the tokens of a checkpoint but the special ones, or None without a tokenizer.json. Raises ConfigError."""
    file = path / "tokenizer.json"
    return JsonFields(file, read_json_object(file)).child("model").raw("vocab") if file.is_file() else None


def _without_drafts(plan: BatchPlan) -> BatchPlan:
    """Return the plan as it would be without its drafts; only the sequences that want some sample."""
    num_plain, num_drafts = len(plan.rows) - len(plan.num_drafts), sum(plan.num_drafts)
    tokens = np.frombuffer(plan.token_ids, np.uint32)
    return structs.replace(
        plan,
        num_scheduled=plan.num_scheduled[:num_plain] + [1] * len(plan.num_drafts),
        samples=[False] * num_plain + [True] * len(plan.num_drafts),
        num_tokens=plan.num_tokens - num_drafts,
        token_ids=np.delete(tokens, _draft_places(plan)).tobytes(),
        num_drafts=[],
    )


def _with_drafts(plan: BatchPlan, drafts: np.ndarray) -> BatchPlan:
    """Return the plan with ``drafts``, ``[num_drafted, most]``, of which each sequence takes as many as it wants."""
    tokens = np.frombuffer(plan.token_ids, np.uint32).copy()
    num_drafts = np.array(plan.num_drafts)
    tokens[_draft_places(plan)] = drafts[np.arange(drafts.shape[1]) < num_drafts[:, None]]
    return structs.replace(plan, token_ids=tokens.tobytes())


def _draft_places(plan: BatchPlan) -> np.ndarray:
    """Return the indices of the drafts among the plan's tokens: in the last entries, all but the first of each."""
    lens = np.array(plan.num_drafts, np.int64) + 1
    first = len(plan.token_ids) // 4 - int(lens.sum())
    return np.delete(np.arange(first, first + lens.sum()), np.cumsum(lens) - lens)


def _decodes(rows: np.ndarray, starts: np.ndarray, samples: np.ndarray) -> BatchPlan:
    """Return a plan in which rows compute their last tokens."""
    num = len(rows)
    return BatchPlan(
        number=0,
        rows=rows.tolist(),
        starts=starts.tolist(),
        num_scheduled=[1] * num,
        samples=samples.tolist(),
        num_decodes=num,
        num_tokens=num,
        num_context_tokens=int(starts.sum()) + num,
        prefill_work=0,
        token_ids=b"",
        row_starts=[],
        table_writes=[],
        block_copies=[],
    )
