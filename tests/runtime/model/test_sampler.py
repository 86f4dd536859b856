"""Settings by row: what a sequence gets depends on its own row, seed and position."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from flyball_kernels import choose_backend
from flyball_runtime.core.past import Past
from flyball_runtime.core.sampling_params import MAX_SEED, SamplingParams, with_seed
from flyball_runtime.model.sampler import SamplingTensors

VOCAB_SIZE = 50
SETTINGS = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, seed=2),
    SamplingParams(temperature=0.7, top_k=5, seed=3),
    SamplingParams(temperature=1.5, top_p=0.6, seed=4),
    SamplingParams(temperature=1.0, min_p=0.1, seed=5),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05, seed=-(2**63)),
]


def _logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tensors() -> SamplingTensors:
    tensors = SamplingTensors(num_rows=8, device="cpu", backend=choose_backend("cpu"))
    for row, sampling in enumerate(SETTINGS):
        tensors.set_row(row, sampling)
    return tensors


def test_a_greedy_batch_takes_the_likeliest(tensors: SamplingTensors) -> None:
    logits = _logits(3)
    ids = tensors.sample(logits, np.array([0, 7, 0]), np.arange(3))  # row 7 was never set: greedy
    assert ids.dtype == torch.int64
    assert ids.tolist() == logits.argmax(-1).tolist()


def test_rows_that_ask_for_nothing_need_no_settings(tensors: SamplingTensors) -> None:
    logits = _logits(3)
    ids = tensors.likeliest(logits, [0, 7, 0])
    assert ids is not None and ids.tolist() == logits.argmax(-1).tolist()
    asking = [*SETTINGS[1:], SamplingParams(temperature=0.0, seed=1, logprobs=0)]
    asking.append(SamplingParams(temperature=0.0, seed=1, logit_bias={3: 1.0}))
    asking.append(SamplingParams(temperature=0.0, seed=1, repetition_penalty=1.5))
    for sampling in asking:
        tensors.set_row(5, sampling, Past(1, [2], [], []) if sampling.changes_logits else None)
        assert tensors.likeliest(logits, [0, 5, 7]) is None
    tensors.set_row(5, SETTINGS[0])  # the next sequence of the row
    assert tensors.likeliest(logits, [0, 5, 7]) is not None


@pytest.mark.parametrize("others", [[], [0], [3, 4, 0, 1, 5, 2]])
def test_the_rest_of_the_batch_does_not_matter(tensors: SamplingTensors, others: list[int]) -> None:
    for row in range(len(SETTINGS)):
        rows = [*others, row]
        for position in range(20):
            alone = tensors.sample(_logits(1, seed=position), np.array([row]), np.array([position]))
            logits = torch.cat((_logits(len(others), seed=99), _logits(1, seed=position)))
            positions = np.array([*range(100, 100 + len(others)), position])
            assert tensors.sample(logits, np.array(rows), positions)[-1] == alone[0]


def test_filters_reach_their_rows(tensors: SamplingTensors) -> None:
    logits = _logits(1)
    drawn = {
        row: {int(tensors.sample(logits, np.array([row]), np.array([position]))) for position in range(300)}
        for row in range(len(SETTINGS))
    }
    likeliest = logits[0].argsort(descending=True).tolist()
    probabilities = logits[0].softmax(-1)
    assert drawn[0] == {likeliest[0]}
    assert drawn[2] <= set(likeliest[:5])
    assert drawn[4] <= set((probabilities >= 0.1 * probabilities.max()).nonzero().flatten().tolist())
    assert len(drawn[1]) > len(drawn[4])
    assert all(len(drawn[row]) > 1 for row in (2, 3, 4, 5))


def test_seed_and_position_choose_the_number(tensors: SamplingTensors) -> None:
    uniform = torch.zeros(1, VOCAB_SIZE)

    def draw(row: int) -> list[int]:
        return [int(tensors.sample(uniform, np.array([row]), np.array([position]))) for position in range(30)]

    first = draw(1)
    assert len(set(first)) > 10
    tensors.set_row(6, SamplingParams(temperature=1.0, seed=2))  # the same seed in another row
    assert draw(6) == first
    tensors.set_row(6, SamplingParams(temperature=1.0, seed=3))
    assert draw(6) != first


def test_a_row_forgets_its_last_owner(tensors: SamplingTensors) -> None:
    tensors.set_row(5, SamplingParams(temperature=0.0, seed=0))
    logits = _logits(1)
    assert int(tensors.sample(logits, np.array([5]), np.array([3]))) == int(logits.argmax())


def test_a_request_without_a_seed_gets_one() -> None:
    rng = random.Random(0)
    first, second = (with_seed(SamplingParams(temperature=0.5, top_k=3), rng) for _ in range(2))
    assert first.seed is not None
    assert 0 <= first.seed <= MAX_SEED
    assert first.seed != second.seed
    assert (first.temperature, first.top_k) == (0.5, 3)
    assert with_seed(SamplingParams(), random.Random(0)).seed == first.seed


def test_a_request_with_a_seed_keeps_it() -> None:
    sampling = SamplingParams(seed=0)
    assert with_seed(sampling, random.Random(0)) is sampling


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(tensors: SamplingTensors) -> None:
    on_gpu = SamplingTensors(num_rows=8, device="cuda", backend=choose_backend("cuda"))
    for row, sampling in enumerate(SETTINGS):
        on_gpu.set_row(row, sampling)
    logits, rows, positions = _logits(6), np.arange(6), np.arange(6)
    expected = tensors.sample(logits, rows, positions)
    assert on_gpu.sample(logits.cuda(), rows, positions).tolist() == expected.tolist()
