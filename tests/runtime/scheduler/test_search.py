"""Which outputs a beam search keeps. That they are those of transformers is checked in ``engine/test_beam_search.py``."""

import pytest

from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.request import TokenLogprobs
from flyball_runtime.scheduler.search import Search, Trail
from sequences import make_sequence

STOP = 0


def advance(search: Search, *logprobs: float) -> list[list[int]]:
    """Have the stop token follow each beam with the first of these log probabilities, 7 with the second, and so on."""
    ids = [STOP, 7, 8][: len(logprobs)]
    for beam in search.beams:
        beam.candidates = TokenLogprobs(ids[0], logprobs[0], ids, list(logprobs))
    search.beams = [child for child, _ in search.advance()]
    return [one.token_ids for one in search.hypotheses]


def test_the_tokens_of_an_output_that_is_not_kept_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide search has many such outputs in each step, each as long as its beams."""
    gathered = []
    tokens = Trail.tokens
    monkeypatch.setattr(Trail, "tokens", lambda trail: gathered.append(trail) or tokens(trail))
    settings = BeamSearch(width=2, early_stopping="never")
    search = Search(make_sequence(3, max_tokens=20, eos_token_ids=[STOP], beam_search=settings), settings)
    advance(search, -0.1, -0.2, -3.0)
    kept = advance(search, -0.1, -0.2, -3.0)
    assert (kept, len(gathered)) == ([[STOP], [7, STOP]], 2)
    assert advance(search, -1.0, -1.1, -3.0) == kept
    assert len(gathered) == 2 and search.beams, "it goes on, and kept nothing more"
