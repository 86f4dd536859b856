"""Drafts that the model agrees with, and the distribution of what comes out."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_kernels import choose_backend
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.model.sampler import NO_TOKEN, SamplingTensors
from flyball_runtime.model.verify import verify

DRAFTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(drafts=DRAFTS, num_plain=st.integers(0, 3), data=st.data())
def test_drafts_are_accepted_up_to_the_first_that_is_not_chosen(drafts: list[list[int]], num_plain: int, data) -> None:
    num_chosen = num_plain + sum(1 + len(one) for one in drafts)
    chosen = data.draw(st.lists(st.integers(NO_TOKEN, 2), min_size=num_chosen, max_size=num_chosen))
    num_accepted, last, at = [], chosen[:num_plain], num_plain
    for one in drafts:
        choices = chosen[at : at + len(one) + 1]
        agree = [choice == draft for choice, draft in zip(choices, one, strict=False)]
        num_accepted.append([*agree, False].index(False))
        last.append(choices[num_accepted[-1]])
        at += len(choices)
    verified = verify(torch.tensor(chosen), np.concatenate(drafts), [len(one) for one in drafts])
    assert verified.num_accepted.tolist() == num_accepted
    assert verified.token_ids.tolist() == last


def test_sampled_tokens_have_the_distribution_of_the_model() -> None:
    """Two drafts, of which the first is likely and the second is not, for 20,000 seeds.

    What comes out is as many drafts as were accepted, and a token. A draft has the probability that the model gives it, and so
    has each token in its place.
    """
    num, vocab_size, drafts = 20_000, 6, [2, 4]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(5))
    logits[0, 2] += 1.5
    logits[1, 4] += 1.5
    kept = logits.topk(5).values[:, -1:]
    probabilities = (logits.where(logits >= kept, float("-inf")) / 0.8).softmax(dim=1).tolist()

    tensors = SamplingTensors(num, "cpu", choose_backend("cpu"))
    for row in range(num):
        tensors.set_row(row, SamplingParams(temperature=0.8, top_k=5, seed=row))
    rows, positions = np.repeat(np.arange(num), 3), np.tile(np.arange(10, 13), num)
    chosen = tensors.sample(logits.repeat(num, 1), rows, positions)
    verified = verify(chosen, np.array(drafts * num), [2] * num)
    outcomes = verified.num_accepted * vocab_size + verified.token_ids
    counts = outcomes.bincount(minlength=3 * vocab_size).tolist()

    reached, chi_square, num_outcomes = float(num), 0.0, 0
    for at, row in enumerate(probabilities):
        for token, probability in enumerate(row):
            expected = 0.0 if at < 2 and token == drafts[at] else reached * probability
            count = counts[at * vocab_size + token]
            assert expected > 0 or count == 0
            if expected:
                chi_square += (count - expected) ** 2 / expected
                num_outcomes += 1
        reached *= row[drafts[at]] if at < 2 else 0.0
    assert min(sum(counts[at * vocab_size : (at + 1) * vocab_size]) for at in range(3)) > 500
    assert num_outcomes <= 14
    assert chi_square < 34.5  # the seeds are fixed; the 99.9 % point of 13 degrees of freedom, the most there are here
