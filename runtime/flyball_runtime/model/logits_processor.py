"""What requests change in the model's logits before a token is chosen: grammars, bans, biases, penalties."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flyball_kernels import apply_token_bitmask, penalize
from flyball_kernels.backend import Backend
from flyball_runtime.core.past import Past
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.grammar.cache import GrammarCache
from flyball_runtime.model.grammar_rows import GrammarMasks, GrammarRow

BANNED = float("-inf")
ANY, NONE = -1, -2
"""In the beginning of a bad word: any token fits. In the place of a token that is not there: only that fits."""


class LogitsProcessor:
    """Changes the logits of rows that ask for it. ``SamplingTensors`` knows batches without any, and leaves them out.

    In this order: what a grammar does not allow is banned, then all but the allowed tokens, then bad words, then what would
    end an output that is too short, unless its grammar lets nothing else follow; biases are added; penalties come last
    (vLLM's order).

    A row that counts tokens keeps them on the device: those that its sequence had when it took the row over, and then
    those that are sampled. So a step can be launched before anybody has seen the last one's tokens. They take 8 bytes
    each at most, beside the kilobytes of a token in the KV cache.
    """

    def __init__(self, num_rows: int, device: torch.device, backend: Backend, grammars: GrammarCache) -> None:
        self._grammars = grammars
        self._masks = GrammarMasks()
        self._backend = backend
        self._device = device
        self._rows: list[_Row | None] = [None] * num_rows

    def set_row(self, row: int, sampling: SamplingParams, past: Past | None) -> None:
        """Forget the row's last owner. ``past`` is there for settings that change logits."""
        if not sampling.changes_logits:
            self._rows[row] = None
            return
        assert past is not None, "settings that change logits come with the sequence's past"
        grammar = None
        if sampling.grammar is not None:
            grammar = GrammarRow(self._grammars.get(sampling.grammar), past.output_token_ids)
        self._rows[row] = _Row(sampling, past, grammar, self._device)

    def apply(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> dict[int, str]:
        """Change the logits in place; arguments as in ``SamplingTensors.sample``.

        Returns:
            Why a grammar leaves no token, by index into the logits, where it leaves none.
        """
        asking = self._asking(rows, positions)
        return self._change(logits, asking) if asking else {}

    @torch.inference_mode()
    def _change(self, logits: Tensor, asking: "list[_Asking]") -> dict[int, str]:
        stuck = self._constrain(logits, [(one.index, one.row.grammar) for one in asking if one.row.grammar is not None])
        self._allow(logits, [(one.index, one.row.allowed) for one in asking if one.row.allowed is not None])
        for index, row, position in asking:
            if row.bad_words is not None:
                logits[index].index_add_(0, row.bad_words.last, row.bad_words.bans(row.output(position)))
        self._add(logits, [(index, *row.added(position)) for index, row, position in asking])
        self._penalize(logits, [one for one in asking if one.row.sampling.has_penalties])
        return stuck

    def remember(self, rows: np.ndarray, positions: np.ndarray, token_ids: Tensor) -> None:
        """Count the tokens just sampled, and follow them in grammars."""
        grammars: list[GrammarRow] = []
        indices: list[int] = []
        for index, row, position in self._asking(rows, positions):
            if row.history is not None:
                row.append(position, token_ids[index])
            if row.grammar is not None:
                grammars.append(row.grammar)
                indices.append(index)
        if grammars:
            self._masks.catch_up()
            self._masks.sampled(grammars, token_ids[self._tensor(np.array(indices))])

    def _asking(self, rows: np.ndarray, positions: np.ndarray) -> "list[_Asking]":
        owners = ((index, self._rows[row]) for index, row in enumerate(rows.tolist()))
        return [_Asking(index, row, int(positions[index])) for index, row in owners if row is not None]

    def _constrain(self, logits: Tensor, grammars: list[tuple[int, GrammarRow]]) -> dict[int, str]:
        if not grammars:
            return {}
        indices = [index for index, _ in grammars]
        masks, reasons = self._masks.fill([grammar for _, grammar in grammars])
        apply_token_bitmask(logits, self._tensor(masks), indices, backend=self._backend)
        return {indices[at]: reason for at, reason in reasons.items()}

    def _allow(self, logits: Tensor, allowed: list[tuple[int, np.ndarray]]) -> None:
        if not allowed:
            return
        where = self._places(allowed)
        kept = logits[where]
        logits.index_fill_(0, self._tensor(np.array([index for index, _ in allowed])), BANNED)
        logits.index_put_(where, kept)

    def _add(self, logits: Tensor, added: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        added = [one for one in added if one[1].size]
        if not added:
            return
        values = self._tensor(np.concatenate([values for _, _, values in added]))
        logits.index_put_(self._places((index, ids) for index, ids, _ in added), values, accumulate=True)

    def _penalize(self, logits: Tensor, asking: "list[_Asking]") -> None:
        if not asking:
            return
        settings = [row.sampling for _, row, _ in asking]
        penalize(
            logits,
            [index for index, _, _ in asking],
            [row.known(position) for _, row, position in asking],
            [row.num_prompt for _, row, _ in asking],
            [one.repetition_penalty for one in settings],
            [one.presence_penalty for one in settings],
            [one.frequency_penalty for one in settings],
            backend=self._backend,
        )

    def _places(self, ids_of_rows: Iterable[tuple[int, np.ndarray]]) -> tuple[Tensor, Tensor]:
        indices, ids = zip(*ids_of_rows, strict=True)
        lengths = [len(one) for one in ids]
        return self._tensor(np.repeat(indices, lengths)), self._tensor(np.concatenate(ids))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class _Asking(NamedTuple):
    """``index``: into the logits. ``position``: how many tokens the sequence has."""

    index: int
    row: "_Row"
    position: int


class _Row:
    """What one sequence wants, and its tokens as far as that counts them.

    Attributes:
        grammar: where the sequence is in its grammar, or None.
        allowed: int64 token ids, or None.
        num_prompt: tokens of the history that come before the output.
        history: int32 tokens, with room for more; None when nothing counts them.
    """

    def __init__(self, sampling: SamplingParams, past: Past, grammar: GrammarRow | None, device: torch.device) -> None:
        self.sampling = sampling
        self.grammar = grammar
        self.allowed = None if sampling.allowed_token_ids is None else np.unique(np.array(sampling.allowed_token_ids))
        singles = [word[0] for word in sampling.bad_words_token_ids if len(word) == 1]
        longer = [word for word in sampling.bad_words_token_ids if len(word) > 1]
        self.bad_words = _BadWords(longer, device) if longer else None
        self._ids = np.array([*sampling.logit_bias, *singles], np.int64)
        self._values = np.array([*sampling.logit_bias.values(), *[BANNED] * len(singles)], np.float32)
        self._endings = np.array(past.stop_token_ids, np.int64)
        self._first_position = past.num_prompt_tokens
        self.num_prompt = len(past.prompt_token_ids)
        self.history: Tensor | None = None
        if longer or sampling.has_penalties:
            tokens = np.array(past.prompt_token_ids + past.output_token_ids, np.int32)
            self.history = torch.from_numpy(tokens).to(device)

    def added(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, and what to add to their logits at this position."""
        if not self._endings.size or position - self._first_position >= self.sampling.min_tokens:
            return self._ids, self._values
        if self.grammar is not None and self.grammar.allows_only(self._endings):
            return self._ids, self._values
        bans = np.full(self._endings.size, BANNED, np.float32)
        return np.concatenate((self._ids, self._endings)), np.concatenate((self._values, bans))

    def known(self, position: int) -> Tensor:
        """Return the history of a sequence that has ``position`` tokens."""
        assert self.history is not None, "only rows that count tokens are asked"
        return self.history[: self._length(position)]

    def output(self, position: int) -> Tensor:
        return self.known(position)[self.num_prompt :]

    @torch.inference_mode()
    def append(self, position: int, token_id: Tensor) -> None:
        """Add the token at ``position``; one that is none counts as token 0, in a sequence that has failed."""
        assert self.history is not None, "only rows that count tokens are told"
        length = self._length(position)
        if length == len(self.history):
            self.history = F.pad(self.history, (0, length + 16))
        self.history[length] = token_id.clamp(min=0)

    def _length(self, position: int) -> int:
        return self.num_prompt + position - self._first_position


class _BadWords:
    """Token sequences of two or more, whose last token is banned behind the others.

    Attributes:
        last: ``[num_words]`` int64.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], device: torch.device) -> None:
        longest = max(map(len, words)) - 1
        beginnings = [(ANY,) * (longest - len(word) + 1) + word[:-1] for word in words]
        self._beginnings = torch.tensor(beginnings, dtype=torch.int32, device=device)
        self.last = torch.tensor([word[-1] for word in words], device=device)

    def bans(self, output: Tensor) -> Tensor:
        """Return ``[num_words]`` fp32 to add to the logits of ``last``: BANNED where the output ends in the beginning."""
        longest = self._beginnings.shape[1]
        ending = output[max(0, len(output) - longest) :]
        ending = F.pad(ending, (longest - len(ending), 0), value=NONE)
        fits = ((self._beginnings == ending) | (self._beginnings == ANY)).all(dim=1)
        return torch.zeros(len(fits), device=fits.device).masked_fill_(fits, BANNED)
