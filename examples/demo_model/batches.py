"""Conversations and documents as padded batches of token ids, with the loss on what the model should say."""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import corpus
import torch
from tokenizer import MAX_LENGTH, TEXT_END, TURN_END, TURN_START
from transformers import PreTrainedTokenizerFast

_POOL_SIZE = 1024  # examples that are sorted by length together, so that a batch has little padding
_DOCUMENTS_PER_POOL = 30
_AT_THE_ENDS = 0.3


class Example(NamedTuple):
    """Token ids, and for each of them how much it counts in the loss (0: it is only read)."""

    ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Both ``[num_examples, longest]``, padded on the right: ``ids`` int64, ``weights`` fp32."""

    ids: torch.Tensor
    weights: torch.Tensor


def _example(parts: list[tuple[str, bool]], tokenizer: PreTrainedTokenizerFast) -> Example:
    """The parts one after another; those marked True are learned."""
    ids: list[int] = []
    weights: list[float] = []
    for text, learned in parts:
        part = tokenizer.encode(text)
        ids += part
        weights += _weights(len(part)) if learned else [0.0] * len(part)
    return Example(ids[:MAX_LENGTH], weights[:MAX_LENGTH])


def _weights(num_tokens: int) -> list[float]:
    """How much each token of an answer counts.

    1/sqrt(length), else stories would drown the short answers, which are harder; and more at both ends, where it is
    decided what the answer is about and whether it is complete.
    """
    inside = num_tokens**-0.5
    return [max(inside, _AT_THE_ENDS) if i < 8 or i >= num_tokens - 2 else inside for i in range(num_tokens)]


def conversation_parts(messages: list[corpus.Message]) -> list[tuple[str, bool]]:
    """What the chat template writes, cut where the assistant starts and ends to speak."""
    parts = []
    for message in messages:
        parts.append((f"{TURN_START}{message['role']}\n", False))
        parts.append((message["content"] + TURN_END, message["role"] == "assistant"))
        parts.append(("\n", False))
    return parts


def batches(seed: int, tokens_per_batch: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Batches without end, each of about ``tokens_per_batch`` tokens with its padding."""
    rng = random.Random(seed)
    conversations, documents = corpus.conversations(seed), corpus.documents(seed)
    while True:
        pool = [conversation_parts(c) for c in itertools.islice(conversations, _POOL_SIZE - _DOCUMENTS_PER_POOL)]
        pool += [[(text + TEXT_END, True)] for text in itertools.islice(documents, _DOCUMENTS_PER_POOL)]
        examples = sorted((_example(parts, tokenizer) for parts in pool), key=lambda example: len(example.ids))
        cut = list(_cut(examples, tokens_per_batch))
        rng.shuffle(cut)
        yield from (_padded(group, tokenizer.pad_token_id) for group in cut)


def _cut(examples: list[Example], tokens_per_batch: int) -> Iterator[list[Example]]:
    group: list[Example] = []
    for example in examples:  # sorted: this one is the longest of its group
        if group and (len(group) + 1) * len(example.ids) > tokens_per_batch:
            yield group
            group = []
        group.append(example)
    yield group


def _padded(group: list[Example], pad_id: int) -> Batch:
    longest = max(len(example.ids) for example in group)
    ids = [example.ids + [pad_id] * (longest - len(example.ids)) for example in group]
    weights = [example.weights + [0.0] * (longest - len(example.weights)) for example in group]
    return Batch(torch.tensor(ids), torch.tensor(weights))
