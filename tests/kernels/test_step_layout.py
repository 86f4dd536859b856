"""The layout of a step, in C++, Triton and numpy; ``tests/runtime/engine/test_rows.py`` holds both to one written naively."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flyball_kernels import Backend, step_layout
from flyball_kernels.step_layout import StepLayout
from kernel_checks import CPP, DEVICE, TRITON, poisoned

BACKENDS = [CPP, Backend("torch"), TRITON]


def laid_out(backend: Backend, **inputs: Any) -> StepLayout:
    """Return the layout of the op, with tensors on the host."""
    if backend.name == "triton":
        inputs |= {name: inputs[name].to(DEVICE) for name in ("block_tables", "last_token_ids")}
    with poisoned():
        layout = step_layout(**inputs, backend=backend)
    return StepLayout(*(_on_host(value) for value in layout))


def _on_host(value: Any) -> Any:
    return (
        [_on_host(one) for one in value]
        if isinstance(value, list)
        else value.cpu()
        if isinstance(value, Tensor)
        else value
    )


def given(**changes: Any) -> dict[str, Any]:
    """Return a step of two decodes and two prompts, of which one ends here, with two groups of layers."""
    tables = torch.arange(2 * 6 * 5, dtype=torch.int32).view(2, 6, 5) * 7 % 61
    entries = [
        [3, 0, 5, 1],  # rows
        [4, 19, 6, 0],  # tokens that are computed already
        [1, 1, 5, 3],
        [1, 1, 0, 2],  # tokens whose logits are wanted
    ]
    return {
        "entries": torch.tensor(entries),
        "num_decodes": 2,
        "token_ids": torch.arange(100, 108),
        "block_tables": tables,
        "last_token_ids": torch.tensor([40, 41, 42, 43, 44, -1]),
        "block_size": 4,
    } | changes


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_lays_out_every_token(backend):
    inputs = given()
    layout = laid_out(backend, **inputs)
    assert layout.token_ids.tolist() == [43, 40, *range(100, 108)]
    assert layout.positions.tolist() == [4, 19, 6, 7, 8, 9, 10, 0, 1, 2]
    rows = [3, 0, *[5] * 5, *[1] * 3]
    for slots, of_group, tables in zip(layout.slot_mappings, layout.block_tables, inputs["block_tables"], strict=True):
        wanted = [
            int(tables[row, at // 4]) * 4 + at % 4 for row, at in zip(rows, layout.positions.tolist(), strict=True)
        ]
        assert slots.tolist() == wanted and slots.dtype == torch.int64
        assert torch.equal(of_group, tables[[3, 0, 5, 1]]) and of_group.is_contiguous()
    assert (layout.cu_query_lens.tolist(), layout.cu_query_lens.dtype) == ([0, 1, 2, 7, 10], torch.int32)
    assert (layout.context_lens.tolist(), layout.context_lens.dtype) == ([5, 20, 11, 3], torch.int32)
    assert layout.logits_indices.tolist() == [0, 1, 8, 9]
    assert (layout.cu_logits_lens.tolist(), layout.cu_logits_lens.dtype) == ([0, 1, 2, 2, 4], torch.int32)
    assert (layout.max_query_len, layout.max_logits_len, layout.max_context_len) == (5, 2, 20)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_tables_go_as_far_as_the_longest_context(backend):
    entries = torch.tensor([[2, 4], [3, 7], [1, 1], [1, 1]])
    layout = laid_out(backend, **given(entries=entries, token_ids=torch.empty(0, dtype=torch.int64)))
    assert [table.shape for table in layout.block_tables] == [(2, 2)] * 2
    assert layout.token_ids.tolist() == [42, 44]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_row_without_a_token_goes_on_with_token_0(backend):
    entries = torch.tensor([[5, 4], [3, 7], [1, 1], [1, 1]])
    inputs = given(entries=entries, token_ids=torch.empty(0, dtype=torch.int64))
    assert laid_out(backend, **inputs).token_ids.tolist() == [0, 44]
    assert inputs["last_token_ids"].tolist() == [40, 41, 42, 43, 44, -1]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((6, 0, 3, 2), r"entry 3 computes 3 tokens behind 0 in row 6; there are 6 rows of up to 20 tokens"),
        ((-1, 0, 3, 2), "in row -1"),
        ((1, -1, 3, 2), "3 tokens behind -1"),
        ((1, 18, 3, 2), "3 tokens behind 18"),
        ((1, 2**62, 3, 2), "3 tokens behind"),
        ((1, 5, 0, 0), "0 tokens behind 5"),
        ((1, 0, 3, 4), "computes 3 tokens and wants logits of 4"),
        ((1, 0, 3, -1), "wants logits of -1"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(backend, entry, message):
    inputs = given()
    inputs["entries"][:, 3] = torch.tensor(entry)
    with pytest.raises(IndexError, match=message):
        laid_out(backend, **inputs)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": torch.arange(7)}, ValueError, "token_ids has 7 tokens; the entries but the decodes compute 8"),
        ({"num_decodes": 3}, IndexError, "entry 2 computes 5 tokens and wants logits of 0"),
        ({"entries": torch.empty(4, 0, dtype=torch.int64)}, ValueError, "a step has at least one entry"),
        ({"entries": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, r"entries has shape \[3, 2\]"),
        ({"entries": torch.zeros(4, 2)}, ValueError, r"entries is torch\.float32"),
        ({"last_token_ids": torch.arange(5)}, ValueError, r"last_token_ids has shape \[5\]; it must be \[6\]"),
        ({"block_tables": torch.zeros(2, 6, 5)}, ValueError, r"block_tables is torch\.float32"),
    ],
)
def test_inputs_are_checked(backend, changes, error, message):
    with pytest.raises(error, match=message):
        laid_out(backend, **given(**changes))
