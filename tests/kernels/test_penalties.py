from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import flyball_kernels
from flyball_kernels.penalties import kernel, reference
from kernel_checks import CPP, DEVICE, TRITON, assert_close

penalize = partial(flyball_kernels.penalize, backend=CPP)
BOTH = pytest.mark.parametrize("run", [penalize, reference.penalize], ids=["op", "reference"])


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@examples(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 50), num_rows=st.integers(1, 6))
def test_equals_the_reference(data: st.DataObject, vocab: int, num_rows: int) -> None:
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    histories = [ids(*data.draw(st.lists(st.integers(0, vocab - 1), max_size=80))) for _ in rows]
    num_prompt = [data.draw(st.integers(0, len(history))) for history in histories]
    repetition = [data.draw(st.floats(0.125, 10, width=32)) for _ in rows]
    presence, frequency = ([data.draw(st.floats(-2, 2, width=32)) for _ in rows] for _ in range(2))
    logits = torch.randn(num_rows, vocab)
    logits[:, :: 1 + vocab // 3] = -torch.inf
    expected = logits.clone()
    reference.penalize(expected, rows, histories, num_prompt, repetition, presence, frequency)
    penalize(logits, rows, histories, num_prompt, repetition, presence, frequency)
    assert_close(logits, expected)


@BOTH
def test_repetition_is_that_of_transformers(run) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor  # here, because `make arm` has no transformers

    logits, history = torch.randn(1, 100), torch.randint(0, 100, (1, 40))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())
    run(logits, [0], [history[0].int()], [25], [1.3], [0.0], [0.0])
    assert logits.equal(expected)


@BOTH
def test_presence_and_frequency_count_the_output_alone(run) -> None:
    logits = torch.zeros(2, 5)
    run(logits, [1], [ids(0, 0, 1, 2, 1, 1)], [2], [1.0], [0.5], [0.25])
    assert logits.tolist() == [[0.0] * 5, [0.0, -1.25, -0.75, 0.0, 0.0]]


def test_many_rows_run_in_parallel() -> None:
    logits = torch.randn(64, 3000)
    history = torch.randint(0, 3000, (64, 2000), dtype=torch.int32)
    arguments = (range(64), list(history), [1000] * 64, [1.2] * 64, [0.3] * 64, [0.1] * 64)
    expected = logits.clone()
    reference.penalize(expected, *arguments)
    penalize(logits, *arguments)
    assert_close(logits, expected)


@pytest.mark.parametrize("block", [16, 1024])
def test_triton_equals_the_reference(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", block)
    vocab, lengths = 37, [0, 1, 16, 90]
    logits = torch.randn(6, vocab)
    logits[:, ::9], logits[4, 3] = -torch.inf, torch.nan
    histories = [torch.randint(0, vocab, (length,), dtype=torch.int32) for length in lengths]
    others = [0, 0, 7, 40], [1.0, 0.5, 1.3, 1.7], [0.5, 0.0, -1.0, 0.25], [0.0, 0.5, 0.25, -0.125]
    expected = logits.clone()
    reference.penalize(expected, [5, 0, 1, 4], histories, *others)
    on_device = logits.to(DEVICE)
    penalize = partial(flyball_kernels.penalize, on_device, backend=TRITON)
    penalize([5, 0, 1, 4], [one.to(DEVICE) for one in histories], *others)
    # a product and a difference, each rounded: in the same order, so to the same bits
    torch.testing.assert_close(on_device.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    penalize([], [], [], [], [], [])
    torch.testing.assert_close(on_device.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_triton_skips_ids_outside_the_vocabulary() -> None:
    logits = torch.ones(1, 5, device=DEVICE)
    history = ids(-1, 5, 2**31 - 1, -(2**31), 2).to(DEVICE)
    flyball_kernels.penalize(logits, [0], [history], [0], [2.0], [0.0], [0.0], backend=TRITON)
    assert logits.tolist() == [[1.0, 1.0, 0.5, 1.0, 1.0]]


@pytest.mark.gpu
def test_many_rows_on_a_gpu() -> None:
    logits, histories = torch.randn(64, 151_936), list(torch.randint(0, 151_936, (64, 5000), dtype=torch.int32))
    others = [1000] * 64, [1.2] * 64, [0.3] * 64, [0.1] * 64
    expected = logits.clone()
    reference.penalize(expected, range(64), histories, *others)
    on_gpu = logits.cuda()
    flyball_kernels.penalize(on_gpu, range(64), [one.cuda() for one in histories], *others, backend=TRITON)
    assert_close(on_gpu.cpu(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [2]}, "rows is"),
        ({"rows": [0, 1]}, "entries"),
        ({"histories": [torch.tensor([1])]}, "int32"),
        ({"histories": [torch.arange(8, dtype=torch.int32)[::2]]}, "contiguous"),
        ({"num_prompt_tokens": [4]}, "num_prompt_tokens is 4"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    good = {"rows": [0], "histories": [ids(1, 2, 3)], "num_prompt_tokens": [1]}
    with pytest.raises(ValueError, match=message):
        penalize(torch.zeros(2, 5), **(good | change), repetition=[1.0], presence=[0.0], frequency=[0.0])


@pytest.mark.parametrize("token_id", [-1, 5])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(IndexError, match="history holds"):
        penalize(torch.zeros(1, 5), [0], [ids(token_id)], [0], [1.0], [0.0], [0.0])
