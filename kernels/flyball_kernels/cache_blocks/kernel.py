"""Triton kernel that moves blocks: all tensors of a cache in one launch, one program per (block, tensor, piece).

The kernel gets the tensors' addresses in a table, as there may be any number. It moves words, whatever they mean.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.spec import Spec

BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def move_kernel(
    table_ptr,  # [2, num_tensors + 1] int64: addresses of the tensors; where each one's part of a row begins, in words
    sources_ptr,  # [num_pairs] int64 block ids, or None: rows of content
    targets_ptr,  # likewise
    content_ptr,  # [num_pairs, row_numel] words, or None
    num_tensors,
    row_numel,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(table_ptr + num_tensors + 1 + tensor)
    numel = tl.load(table_ptr + num_tensors + 2 + tensor) - begin
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    blocks_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(WORD))
    if sources_ptr is None:
        source_ptr = content_ptr + pair * row_numel + begin
    else:
        source_ptr = blocks_ptr + tl.load(sources_ptr + pair) * numel
    if targets_ptr is None:
        target_ptr = content_ptr + pair * row_numel + begin
    else:
        target_ptr = blocks_ptr + tl.load(targets_ptr + pair) * numel
    is_word = words < numel
    tl.store(target_ptr + words, tl.load(source_ptr + words, mask=is_word), mask=is_word)


class Table:
    """Where the blocks of ``[num_blocks, numel]`` tensors are. Arguments of its methods are as in CacheBlocks, checked."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [tensor.shape[1] * tensor.dtype.itemsize for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        word = next(num for num in WORDS if all(one % num == 0 for one in (*sizes, *addresses)))
        begins = [begin // word for begin in accumulate(sizes, initial=0)]
        self._table = torch.tensor([[*addresses, 0], begins]).to(tensors[0].device)
        self._num_tensors, self._row_numel = len(tensors), begins[-1]
        self._num_pieces = triton.cdiv(max(sizes) // word, BLOCK)
        self._word = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[word]
        self._tl_word = WORDS[word]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        self._launch(len(sources), sources, targets, None)

    def gather(self, blocks: Tensor, content: Tensor) -> None:
        """``content``: contiguous, and like the tensors aligned."""
        self._launch(len(blocks), blocks, None, content.view(self._word))

    def scatter(self, blocks: Tensor, content: Tensor) -> None:
        self._launch(len(blocks), None, blocks, content.view(self._word))

    def _launch(self, num: int, sources: Tensor | None, targets: Tensor | None, content: Tensor | None) -> None:
        if num and self._num_pieces:
            move_kernel[(num, self._num_tensors, self._num_pieces)](
                self._table,
                sources,
                targets,
                content,
                self._num_tensors,
                self._row_numel,
                WORD=self._tl_word,
                BLOCK=BLOCK,
                **OPTIONS,
            )


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time."""
    types = {"table_ptr": "*i64", "num_tensors": "i32", "row_numel": "i32"}
    sides = {"sources_ptr": "*i64", "targets_ptr": "*i64", "content_ptr": "*i64"}
    for name, absent in (("copy", "content_ptr"), ("gather", "targets_ptr"), ("scatter", "sources_ptr")):
        present = {side: kind for side, kind in sides.items() if side != absent}
        constants = {absent: None, "WORD": tl.int64, "BLOCK": BLOCK}
        yield Spec(f"cache_blocks {name}", move_kernel, types | present, constants, OPTIONS)
