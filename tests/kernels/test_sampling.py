import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import flyball_kernels
from flyball_kernels.sampling import NO_TOKEN, kernel, reference
from kernel_checks import CPP, DEVICE, TRITON, poisoned

sample = partial(flyball_kernels.sample, backend=CPP)

INT64 = torch.iinfo(torch.int64)
BOTH = pytest.mark.parametrize("run", [sample, reference.sample], ids=["op", "reference"])
NAMES = ("temperature", "top_k", "top_p", "min_p")


def settings(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    return {
        "temperature": torch.full((num_rows,), temperature),
        "top_k": torch.full((num_rows,), top_k, dtype=torch.int64),
        "top_p": torch.full((num_rows,), top_p),
        "min_p": torch.full((num_rows,), min_p),
        "seeds": torch.full((num_rows,), seed, dtype=torch.int64),
        "positions": torch.arange(num_rows),
    }


def mixed_settings(num_rows):
    """Every combination of filters side by side, greedy rows among them."""
    rows = torch.arange(num_rows)
    return {
        "temperature": torch.tensor([1.0, 0.0, 0.7, 1.5, 0.01])[rows % 5],
        "top_k": torch.tensor([0, 1, 5, 40, 10**6, 0, 3])[rows % 7],
        "top_p": torch.tensor([1.0, 0.9, 0.5, 1e-6])[rows % 4],
        "min_p": torch.tensor([0.0, 0.0, 0.1])[rows % 3],
        "seeds": rows * 7919 - 50,
        "positions": rows % 11,
    }


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000, 4099])
def test_equals_the_reference(vocab):
    logits = torch.randn(420, vocab) * 3
    rows = mixed_settings(420)
    assert sample(logits, **rows).equal(reference.sample(logits, **rows))


@pytest.mark.parametrize("backend", [CPP, flyball_kernels.Backend("torch"), TRITON], ids=["op", "reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 100, 4099])
def test_logits_of_16_bits_give_the_tokens_of_the_same_in_32(vocab, dtype, backend):
    logits, rows = (torch.randn(60, vocab) * 3).to(dtype), mixed_settings(60)
    logits[3] = torch.nan
    logits[7] = -torch.inf
    given = [one.to(DEVICE) if backend is TRITON else one for one in (logits, logits.float())]
    rows = {name: one.to(DEVICE) if backend is TRITON else one for name, one in rows.items()}
    narrow, wide = (flyball_kernels.sample(one, **rows, backend=backend) for one in given)
    assert narrow.equal(wide)
    assert narrow[[3, 7]].tolist() == [NO_TOKEN] * 2
    none = dict.fromkeys(rows)
    greedy = flyball_kernels.sample(given[0], **none, backend=backend).cpu()
    assert greedy.equal(reference.sample(logits.float(), **none))


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("rounds", [False, True], ids=["", "many equal ones"])
def test_large_vocabularies_equal_the_reference(spread, rounds):
    """Filters look at blocks of tokens and at powers of two first; these need several of both."""
    logits = torch.randn(40, 40_009) * spread
    logits = logits.round() if rounds else logits
    index = torch.arange(40)
    rows = mixed_settings(40) | {
        "top_k": torch.tensor([0, 1, 50, 0, 7000, 39_000, 10**6, 0])[index % 8],
        "top_p": torch.tensor([1.0, 0.95, 0.999999, 0.5, 1e-4])[index % 5],
    }
    assert sample(logits, **rows).equal(reference.sample(logits, **rows))


def test_rows_without_filters_equal_the_reference():
    logits = torch.randn(200, 777) * 2
    rows = settings(200, seed=5)
    expected = reference.sample(logits, **rows)
    assert sample(logits, **rows).equal(expected)
    assert sample(logits, **{**rows, "top_k": None, "top_p": None, "min_p": None}).equal(expected)


@BOTH
def test_greedy_takes_the_lowest_of_equal_ids(run):
    logits = torch.zeros(3, 50)
    logits[1, [20, 30]] = 1.0
    rows = settings(3, temperature=0.0, top_k=3, top_p=0.1, min_p=0.5)
    assert run(logits, **rows).tolist() == [0, 20, 0]
    assert run(logits, **{**rows, **dict.fromkeys(NAMES)}).tolist() == [0, 20, 0]


@BOTH
def test_a_row_does_not_depend_on_the_others(run):
    logits = torch.randn(70, 2000) * 2
    rows = mixed_settings(70)
    together = run(logits, **rows)
    alone = [run(logits[i : i + 1], **{k: v[i : i + 1] for k, v in rows.items()}).item() for i in range(70)]
    assert together.tolist() == alone


@BOTH
@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, range(8)),
        ({"top_k": 3}, [1, 4, 6]),
        ({"top_p": 0.6}, [1, 4]),
        ({"min_p": 0.3}, [1, 4, 6]),
        ({"top_k": 2, "top_p": 0.55}, [1]),  # of the two that are left, the first holds 4/7 of the mass
        ({"top_p": 1e-9}, [1]),
        ({"temperature": 0.5}, range(8)),
    ],
)
def test_samples_follow_the_filtered_distribution(run, filters, kept):
    probabilities = torch.tensor([0.05, 0.4, 0.05, 0.02, 0.3, 0.05, 0.125, 0.005])
    count = 20000
    logits = probabilities.log().expand(count, -1)
    counts = run(logits, **settings(count, seed=123, **filters)).bincount(minlength=8)
    weights = torch.zeros(8)
    weights[list(kept)] = probabilities[list(kept)] ** (1 / filters.get("temperature", 1.0))
    expected = weights / weights.sum() * count
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    chi_square = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    # the seed is fixed; 24.3 is the 99.9 % point of 7 degrees of freedom, the most there are here
    assert chi_square < 24.3


def test_uniform_numbers_are_uniform_and_uncorrelated():
    seeds = torch.arange(300).repeat_interleave(300)
    numbers = reference.uniform(seeds, torch.arange(300).repeat(300)).view(300, 300)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = (numbers * 100).long().flatten().bincount(minlength=100)
    assert ((counts - 900.0) ** 2 / 900.0).sum() < 148.2  # 99.9 % point of 99 degrees of freedom
    for shifted in (numbers[1:, :], numbers[:, 1:]):
        other = numbers[: shifted.shape[0], : shifted.shape[1]]
        correlation = torch.corrcoef(torch.stack([shifted.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.012  # 3.5 standard errors of 90,000 pairs


def test_negative_seeds_and_the_same_seed_again():
    logits = torch.randn(1, 500).expand(4, -1)
    rows = settings(4)
    rows["seeds"] = torch.tensor([-(2**63), 2**63 - 1, -1, -1])
    rows["positions"] = torch.tensor([0, 0, 9, 9])
    ids = sample(logits, **rows)
    assert ids[2] == ids[3]
    assert ids.equal(reference.sample(logits, **rows))


def test_forbidden_tokens_are_never_sampled():
    logits = torch.full((500, 40), float("-inf"))
    logits[:, [3, 17]] = 0.0
    for filters in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.01}):
        assert set(sample(logits, **settings(500, **filters)).tolist()) == {3, 17}


SAMPLED = [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}]


@BOTH
@pytest.mark.parametrize("filters", SAMPLED)
@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-38, 1e-20, 9.9e-6])
def test_the_lowest_temperatures_are_greedy(run, temperature, filters):
    logits = torch.zeros(20, 50)
    logits[:, [20, 30]] = 1.0
    assert run(logits, **settings(20, temperature=temperature, **filters)).tolist() == [20] * 20


@BOTH
@pytest.mark.parametrize("filters", SAMPLED)
def test_a_low_temperature_leaves_the_likeliest(run, filters):
    logits = torch.randn(50, 300)
    ids = run(logits * 5e37, **settings(50, temperature=1e-5, **filters))  # the scaled logits overflow
    assert ids.equal(logits.argmax(-1))


@BOTH
@pytest.mark.parametrize("setting", [{"temperature": 0.0}, *SAMPLED])
@pytest.mark.parametrize("vocab", [1, 16, 37])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_row_without_a_distribution_has_no_token(run, bad, vocab, setting):
    clean = torch.randn(9, vocab)
    expected = run(clean, **settings(9, **setting)).tolist()
    logits = clean.clone()
    for row, ids in ((1, [0]), (3, [vocab - 1]), (4, [vocab // 2]), (6, range(vocab))):
        logits[row, list(ids)] = bad
        expected[row] = NO_TOKEN
    logits[8] = -math.inf
    expected[8] = NO_TOKEN
    assert run(logits, **settings(9, **setting)).tolist() == expected
    if "temperature" in setting:
        assert run(logits, **{**settings(9), **dict.fromkeys(NAMES)}).tolist() == expected


@BOTH
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 3e38])
def test_settings_out_of_range_are_safe(run, name, value):
    rows = settings(40, **{"top_k": 7, "top_p": 0.9, "min_p": 0.1, name: value})
    ids = run(torch.randn(40, 100), **rows)
    assert ((ids >= 0) & (ids < 100)).all()


def float32s(low, high, **bounds):
    """Numbers of the range, with those that are next to its ends, to 0 and to the bound of greedy temperatures."""
    special = [1e-45, 1.1754944e-38, 9.99e-6, 1e-5, 1.001e-5, 1e-3, 0.5, 0.99999994, 1.0]
    fitting = [x for x in special if low <= x <= high]
    return st.sampled_from(fitting) | st.floats(low, high, width=32, **bounds)


LOGITS = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, -math.inf, 3e38, -3e38])
ROW = {
    "temperature": float32s(0.0, 2.0),
    "top_k": st.sampled_from([0, 1, 2, 5, INT64.max]) | st.integers(0, INT64.max),
    "top_p": float32s(0.0, 1.0, exclude_min=True),
    "min_p": float32s(0.0, 1.0),
    "seeds": st.sampled_from([0, INT64.min, INT64.max]) | st.integers(INT64.min, INT64.max),
    "positions": st.sampled_from([0, INT64.max]) | st.integers(0, 2**31),
}
TYPES = {name: torch.float32 if name in ("temperature", "top_p", "min_p") else torch.int64 for name in ROW}


def neighbours(row):
    """The row's settings, and those that differ from them by about the rounding errors of a cumulative sum."""
    names = ("temperature", "top_p", "min_p")
    for factors in itertools.product((1.0, 1 - 2**-16, 1 + 2**-16), repeat=len(names)):
        yield row | {name: min(row[name] * factor, 2.0) for name, factor in zip(names, factors, strict=True)}


def check_against_the_reference(logits, row, run=sample):
    """The op's token is the reference's, or what the reference gives for settings a rounding error away."""
    rows = list(neighbours(row))
    tensors = {name: torch.tensor([r[name] for r in rows], dtype=TYPES[name]) for name in ROW}
    row_logits = torch.tensor(logits, dtype=torch.float32).expand(len(rows), -1)
    accepted = set(reference.sample(row_logits, **tensors).tolist())
    token = run(row_logits[:1], **{name: tensor[:1] for name, tensor in tensors.items()}).item()
    assert token in accepted
    finite = [x for x in logits if math.isfinite(x)]
    assert (token == NO_TOKEN) == (not finite or any(math.isnan(x) or x == math.inf for x in logits))


@examples(max_examples=150)
@given(st.lists(LOGITS, min_size=1, max_size=40), st.fixed_dictionaries(ROW))
def test_any_logits_and_any_settings(logits, row):
    check_against_the_reference(logits, row)


@pytest.mark.slow
@examples(max_examples=10_000)
@given(st.lists(LOGITS.filter(math.isfinite), min_size=1, max_size=300), st.fixed_dictionaries(ROW))
def test_many_finite_logits_and_settings(logits, row):
    check_against_the_reference(logits, row)


def sample_by_triton(logits, **settings):
    on_device = {name: one if one is None else one.to(DEVICE) for name, one in settings.items()}
    with poisoned():
        return flyball_kernels.sample(logits.to(DEVICE), **on_device, backend=TRITON).cpu()


OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
"""NumPy, which Triton's interpreter computes with, warns of infinities that a GPU makes too."""


@pytest.fixture
def small_blocks(monkeypatch):
    """Rows of several blocks, which Triton's interpreter finishes soon."""
    monkeypatch.setattr(kernel, "BLOCK", 128)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("equal_logits", [False, True])
@pytest.mark.parametrize(("vocab", "num_rows"), [(1, 7), (31, 21), pytest.param(300, 14, marks=pytest.mark.slow)])
def test_triton_equals_the_reference(vocab, num_rows, equal_logits):
    logits = torch.randn(num_rows, vocab) * 3
    logits = logits.round() if equal_logits else logits
    rows = mixed_settings(num_rows)
    expected = reference.sample(logits, **rows)
    assert sample_by_triton(logits, **rows).equal(expected)
    strided = torch.stack((logits, logits), dim=2)[:, :, 0]
    assert sample_by_triton(strided[:5], **{name: one[:5] for name, one in rows.items()}).equal(expected[:5])


@pytest.mark.usefixtures("small_blocks")
def test_triton_without_settings():
    logits = (torch.randn(9, 200) * 2).round()
    rows = settings(9, seed=5) | {"top_k": None, "top_p": None, "min_p": None}
    assert sample_by_triton(logits, **rows).equal(reference.sample(logits, **rows))
    assert sample_by_triton(logits, **rows | {"temperature": None}).equal(logits.argmax(-1))
    assert sample_by_triton(logits[:0], **{n: one if one is None else one[:0] for n, one in rows.items()}).shape == (0,)


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.4}, {"temperature": 0.0}])
def test_triton_ranks_equal_logits_by_id(filters):
    logits = torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0]).expand(9, -1)
    rows = settings(9, **filters)
    tokens = sample_by_triton(logits, **rows)
    assert tokens.equal(reference.sample(logits, **rows))
    assert set(tokens.tolist()) == ({1} if "temperature" in filters else {1, 2})


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("setting", [{"temperature": 0.0}, SAMPLED[-1]])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_triton_gives_no_token_without_a_distribution(bad, setting):
    logits = torch.randn(7, 200)
    expected = reference.sample(logits, **settings(7, **setting))
    for row, ids in ((1, [0]), (3, [199]), (4, [100]), (5, range(200))):
        logits[row, list(ids)] = bad
    logits[6] = -math.inf
    expected[[1, 3, 4, 5, 6]] = NO_TOKEN
    assert sample_by_triton(logits, **settings(7, **setting)).equal(expected)


@OVERFLOWS
def test_triton_is_safe_with_settings_out_of_range():
    values = torch.tensor([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 3e38])
    for name in ("temperature", "top_p", "min_p"):
        rows = settings(len(values), top_k=7, top_p=0.9, min_p=0.1) | {name: values}
        ids = sample_by_triton(torch.randn(len(values), 100), **rows)
        assert ((ids >= 0) & (ids < 100)).all()


@OVERFLOWS
@examples(max_examples=20)
@given(st.lists(LOGITS, min_size=1, max_size=40), st.fixed_dictionaries(ROW))
def test_triton_with_any_logits_and_any_settings(logits, row):
    check_against_the_reference(logits, row, sample_by_triton)


@pytest.mark.usefixtures("small_blocks")
@OVERFLOWS
@pytest.mark.slow
@examples(max_examples=1000)
@given(st.lists(LOGITS.filter(math.isfinite), min_size=1, max_size=300), st.fixed_dictionaries(ROW))
def test_triton_with_many_finite_logits_and_settings(logits, row):
    check_against_the_reference(logits, row, sample_by_triton)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_triton_samples_follow_the_filtered_distribution(filters):
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    kept = {"top_k": [1, 3, 4], "top_p": [1, 3, 4], "min_p": range(5)}.get(next(iter(filters), ""), range(5))
    counts = sample_by_triton(probabilities.log().expand(500, -1), **settings(500, seed=7, **filters)).bincount(
        minlength=5
    )
    expected = torch.zeros(5)
    expected[list(kept)] = probabilities[list(kept)]
    expected *= 500 / expected.sum()
    used = expected > 0
    assert counts[~used].sum() == 0
    # 18.5 is the 99.9 % point of 4 degrees of freedom, the most there are here; the seed is fixed
    assert ((counts[used] - expected[used]) ** 2 / expected[used]).sum() < 18.5


@pytest.mark.gpu
def test_large_vocabulary_on_a_gpu():
    """A row in which rounding decides may differ: the probability of one is below a thousandth."""
    logits = torch.randn(420, 151_936) * 3
    rows = mixed_settings(420)
    on_gpu = {name: one.cuda() for name, one in rows.items()}
    expected = reference.sample(logits.cuda(), **on_gpu).cpu()
    assert (sample_by_triton(logits, **rows) != expected).sum() <= 1


@pytest.mark.parametrize("backend", [CPP, flyball_kernels.Backend("torch")], ids=["op", "reference"])
def test_refuses_what_does_not_fit(backend):
    sample = partial(flyball_kernels.sample, backend=backend)
    with pytest.raises(ValueError, match=r"logits has shape \[2, 0\]; a row needs at least 1 logit"):
        sample(torch.zeros(2, 0), **settings(2))
    with pytest.raises(ValueError, match=r"logits has shape \[8\]; it must be \[any, any\]"):
        sample(torch.zeros(8), **settings(2))
    logits, rows = torch.zeros(2, 8), settings(2)
    with pytest.raises(
        ValueError, match=r"torch\.float64; it must be torch\.float32 or torch\.bfloat16 or torch\.float16"
    ):
        sample(logits.double(), **rows)
    with pytest.raises(ValueError, match=r"top_k is torch\.int32; it must be torch\.int64"):
        sample(logits, **{**rows, "top_k": rows["top_k"].int()})
    with pytest.raises(ValueError, match=r"seeds has shape \[1\]; it must be \[2\]"):
        sample(logits, **{**rows, "seeds": rows["seeds"][:1]})
    for missing in ("seeds", "positions"):
        with pytest.raises(ValueError, match="rows with a temperature need seeds and positions"):
            sample(logits, **{**rows, missing: None})


@pytest.mark.parametrize("backend", [CPP, flyball_kernels.Backend("torch"), TRITON], ids=["op", "reference", "triton"])
def test_greedy_rows_need_no_settings(backend):
    logits = torch.randn(9, 300)
    logits[4, 7] = torch.nan
    ids = flyball_kernels.sample(logits.to(DEVICE if backend is TRITON else "cpu"), *[None] * 6, backend=backend).cpu()
    expected = logits.argmax(dim=1)
    expected[4] = -1
    assert ids.equal(expected)
