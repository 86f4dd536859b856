import msgspec
import pytest

from flyball_protocol import (
    BootPrior,
    Envelope,
    Limits,
    LimitsAck,
    LimitsChange,
    LimitsReport,
    LimitsStatus,
    LimitsUpdate,
)
from flyball_protocol.limits import LIMITS_HTTP_STATUS

LIMITS = Limits(max_num_seqs=8, kv_cache_fraction=0.5, max_num_batched_tokens=512)
ENVELOPE = Envelope(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    min_num_batched_tokens=1,
    num_kv_blocks=1000,
    min_kv_cache_fraction=0.25,
    block_size=16,
    max_model_len=4000,
)


@pytest.mark.parametrize(
    "value",
    [
        LIMITS,
        ENVELOPE,
        BootPrior(revision=7, limits=LIMITS),
        LimitsUpdate(revision=3, limits=LimitsChange(max_num_seqs=8), ttl_s=90.0),
        LimitsAck(status=LimitsStatus.DEFERRED, revision=3, target=LIMITS, effective=LIMITS, reason="drains"),
        LimitsReport(revision=3, target=LIMITS, effective=LIMITS, envelope=ENVELOPE, last_known_good=LIMITS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_encoded_decodes_to_the_same(value: msgspec.Struct):
    assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value


def test_an_update_as_an_operator_writes_it():
    body = b'{"revision": 41, "limits": {"max_num_seqs": 72, "kv_cache_fraction": 0.83}, "ttl_s": 90}'
    assert msgspec.json.decode(body, type=LimitsUpdate) == LimitsUpdate(
        revision=41, limits=LimitsChange(max_num_seqs=72, kv_cache_fraction=0.83), ttl_s=90.0
    )


def test_a_change_travels_without_the_fields_it_leaves_alone():
    assert msgspec.json.encode(LimitsChange(max_num_seqs=8)) == b'{"max_num_seqs":8}'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"limits": {}}', "missing required field `revision`"),
        ('{"revision": 1}', "missing required field `limits`"),
        ('{"revision": 0, "limits": {}}', r">= 1.*\$.revision"),
        ('{"revision": "1", "limits": {}}', r"Expected `int`, got `str`.*\$.revision"),
        ('{"revision": 1.5, "limits": {}}', r"Expected `int`, got `float`.*\$.revision"),
        ('{"revision": 1, "limits": {}, "ttl": 9}', "unknown field `ttl`"),
        ('{"revision": 1, "limits": {}, "ttl_s": 0}', r"> 0.*\$.ttl_s"),
        ('{"revision": 1, "limits": {}, "ttl_s": 86401}', r"<= 86400.*\$.ttl_s"),
        ('{"revision": 1, "limits": {"max_seqs": 8}}', r"unknown field `max_seqs`.*\$.limits"),
        ('{"revision": 1, "limits": {"max_num_seqs": 0}}', r">= 1.*\$.limits.max_num_seqs"),
        ('{"revision": 1, "limits": {"kv_cache_fraction": 0}}', r"> 0.*\$.limits.kv_cache_fraction"),
        ('{"revision": 1, "limits": {"kv_cache_fraction": 1.01}}', r"<= 1.*\$.limits.kv_cache_fraction"),
        ('{"revision": 1, "limits": {"kv_cache_fraction": NaN}}', "malformed"),
        ('{"revision": 1, "limits": {"max_num_batched_tokens": -5}}', r"\$.limits.max_num_batched_tokens"),
        ('{"revision": 1, "limits": {"step_time_target_ms": -1}}', r">= 0.*\$.limits.step_time_target_ms"),
        (f'{{"revision": {2**53}, "limits": {{}}}}', r"<= 9007199254740991.*\$.revision"),
        (f'{{"revision": {2**64}, "limits": {{}}}}', r"<= 9007199254740991.*\$.revision"),
        (f'{{"revision": 1, "limits": {{"max_num_seqs": {10**30}}}}}', r"<= 2147483647.*\$.limits.max_num_seqs"),
        (f'{{"revision": 1, "limits": {{"max_num_batched_tokens": {2**64}}}}}', r"<= 2147483647.*batched_tokens"),
        (f'{{"revision": 1{"0" * 5000}, "limits": {{}}}}', "out of range"),
        ('{"revision": 1, "limits": {}, "ttl_s": 1e400}', "out of range"),
        ('{"revision": 1, "limits": {"step_time_target_ms": 1e400}}', "out of range"),
        ("[]", "Expected `object`, got `array`"),
        ('{"revision": 1', "truncated"),
    ],
)
def test_a_bad_update_is_refused_with_the_place_of_the_fault(body: str, message: str):
    with pytest.raises(msgspec.DecodeError, match=message):
        msgspec.json.decode(body, type=LimitsUpdate)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (LimitsChange(), LIMITS),
        (LimitsChange(max_num_seqs=9), Limits(max_num_seqs=9, kv_cache_fraction=0.5, max_num_batched_tokens=512)),
        (
            LimitsChange(kv_cache_fraction=1.0, max_num_batched_tokens=64, step_time_target_ms=30.0),
            Limits(max_num_seqs=8, kv_cache_fraction=1.0, max_num_batched_tokens=64, step_time_target_ms=30.0),
        ),
    ],
)
def test_a_change_replaces_only_what_it_names(change: LimitsChange, expected: Limits):
    assert change.applied_to(LIMITS) == expected


def test_every_answer_has_an_http_status():
    assert set(LIMITS_HTTP_STATUS) == set(LimitsStatus)
    assert {status.value for status in LimitsStatus} == {"applied", "deferred", "stale", "rejected"}


def test_limits_do_not_change():
    with pytest.raises(AttributeError):
        LIMITS.max_num_seqs = 9
