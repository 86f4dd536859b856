import pytest

from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.core.sequence import Sequence

EOS = frozenset({2, 3})


def sequence(num_prompt_tokens: int = 4, **sampling: object) -> Sequence:
    prompt = list(range(10, 10 + num_prompt_tokens))
    request = Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
    return Sequence(request, max_model_len=16, eos_token_ids=EOS)


@pytest.mark.parametrize(("max_tokens", "max_total_tokens"), [(None, 16), (1, 5), (12, 16), (13, 16)])
def test_output_ends_at_max_tokens_or_the_model_length(max_tokens: int | None, max_total_tokens: int):
    assert sequence(max_tokens=max_tokens).max_total_tokens == max_total_tokens


def test_own_stop_ids_add_to_the_models():
    assert sequence(stop_token_ids=(7,)).stop_token_ids == {2, 3, 7}


def test_ignore_eos_leaves_own_stop_ids():
    assert sequence(stop_token_ids=(7,), ignore_eos=True).stop_token_ids == {7}


def test_a_sequence_does_not_share_its_requests_list():
    request = Request(request_id="r", prompt_token_ids=[1, 2], sampling=SamplingParams())
    Sequence(request, max_model_len=16, eos_token_ids=EOS).token_ids.append(9)
    assert request.prompt_token_ids == [1, 2]
