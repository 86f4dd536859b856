"""Random requests to every endpoint: nearly valid JSON, odd methods, paths and headers, and requests with bytes changed.

A seed gives the same cases again: ``cases(seed, count)`` for one endpoint table, ``mutated(seed, count)`` for bytes.
"""

import json
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from adversary_kit.condition import FORGED
from flyball_protocol import endpoints

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
SAMPLING: dict[str, Any] = {
    "max_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["e"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "min_tokens": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 1.5},
    "allowed_token_ids": [5, 6, 7, 8],
    "bad_words": ["zz"],
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "add_special_tokens": True,
    "priority": 1,
    "user": "u",
    "logprobs": False,
}


class Endpoint(NamedTuple):
    method: str
    path: str
    body: Mapping[str, Any] | None = None


API = [
    Endpoint("POST", "/v1/completions", {"prompt": "hello"} | SAMPLING),
    Endpoint("POST", "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2}),
    Endpoint("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "temperature": 0}),
    Endpoint("POST", "/v1/completions", {"prompt": [[5], [6, 7]], "max_tokens": 1, "stream": True}),
    Endpoint("POST", "/v1/chat/completions", {"messages": CHAT} | SAMPLING),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 1, "chat_template_kwargs": {"a": {"b": [1]}}, "add_generation_prompt": True},
    ),
    Endpoint("POST", "/tokenize", {"prompt": "hello", "return_token_strs": True, "add_special_tokens": False}),
    Endpoint("POST", "/tokenize", {"messages": CHAT, "chat_template_kwargs": {}, "continue_final_message": True}),
    Endpoint("POST", "/detokenize", {"tokens": [5, 6, 7], "model": "test"}),
    Endpoint("GET", "/v1/models"),
    Endpoint("GET", "/v1/models/test"),
    *(
        Endpoint("GET", p)
        for p in (endpoints.LIVEZ_PATH, endpoints.READYZ_PATH, endpoints.HEALTH_PATH, endpoints.METRICS_PATH)
    ),
]
ADMIN = [  # without the path to drain, after which there would be no more answers
    Endpoint(
        "POST",
        endpoints.ADMIN_LIMITS_PATH,
        {
            "revision": 1,
            "limits": {"max_num_seqs": 60, "kv_cache_fraction": 0.9, "max_num_batched_tokens": 256},
            "ttl_s": 5,
        },
    ),
    Endpoint("GET", endpoints.ADMIN_LIMITS_PATH),
    Endpoint("GET", endpoints.ADMIN_EVIDENCE_PATH),
    Endpoint("GET", "/admin"),
]

ODD_VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.random() < 0.5,
    lambda rng: rng.choice(
        [0, -1, 1, 2, 255, 256, 257, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30]
    ),
    lambda rng: rng.choice([0.0, -0.0, 1e-45, 1e-39, 5e-324, 1e-7, 0.5, 1.0, 1.0000001, 2.0, 2.1, 1e38, 1e308, -1e308]),
    lambda rng: rng.uniform(-3, 3),
    lambda rng: 10 ** rng.uniform(-320, 308),
    lambda rng: rng.choice(
        ["", " ", "\0", "\n", f"\n{FORGED}", "\x1b[31m", "\u202e", "\ud7ff", "é", "🙂", "a" * 5000, "test"]
    ),
    lambda rng: "".join(chr(rng.randrange(0xD800)) for _ in range(rng.randrange(20))),
    lambda rng: rng.choice(
        [[], {}, [[]], [None], [{}], {"": ""}, {"a": {"b": {}}}, [1, "a", None], [0] * 300, [""] * 300]
    ),
    lambda rng: nested(rng, rng.randrange(1, 200)),
]
METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get", "X"]
HEADERS: list[Callable[[random.Random], str]] = [
    lambda rng: (
        "Content-Type: " + rng.choice(["text/plain", "multipart/form-data; boundary=x", "application/xml", "", "\xff"])
    ),
    lambda rng: "Content-Encoding: " + rng.choice(["gzip", "br", "identity", "x"]),
    lambda rng: "X-Request-Id: " + rng.choice(["a", "a b", "\x7f", "i" * 200, "", "../..", "%0a"]),
    lambda rng: "Accept: " + rng.choice(["text/html", "*/*;q=0", "nonsense"]),
    lambda rng: "Accept-Encoding: " + rng.choice(["gzip", "identity;q=0"]),
    lambda rng: "Expect: " + rng.choice(["100-continue", "nonsense"]),
    lambda rng: "Authorization: " + rng.choice(["Bearer", "Bearer a b", "Basic ====", "\xff"]),
    lambda rng: "Cookie: " + "c" * rng.randrange(4000),
    lambda rng: "X-Forwarded-For: " + rng.choice(["::1", "1.2.3.4, 5.6.7.8", "nonsense"]),
    lambda rng: "Origin: http://evil.example",
    lambda rng: "Upgrade: " + rng.choice(["websocket", "h2c"]),
    lambda rng: "Range: bytes=0-1",
    lambda rng: f"{random_name(rng)}: {random_name(rng)}",
]


class Case(NamedTuple):
    """A request, and a few words for a failure's message."""

    request: bytes
    words: str


def random_name(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_letters + string.digits + "-_") for _ in range(rng.randrange(1, 30)))


def nested(rng: random.Random, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def cases(seed: int, count: int, table: Sequence[Endpoint], *headers: str) -> Iterator[Case]:
    """Return requests to the endpoints of ``table``, most of them with something odd; ``headers`` are in each of them."""
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        endpoint = rng.choice(table)
        method = rng.choice(METHODS) if rng.random() < 0.05 else endpoint.method
        path = odd_path(rng, endpoint.path) if rng.random() < 0.05 else endpoint.path
        body = random_body(rng, endpoint.body)
        own = [*headers, *(rng.choice(HEADERS)(rng) for _ in range(rng.choice([0, 0, 0, 0, 1, 2])))]
        lines = [f"{method} {path} HTTP/1.1", "Host: test", "Connection: close", f"Content-Length: {len(body)}", *own]
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        yield Case(request, f"seed {seed}, case {index}: {request[:600]!r}")


def random_body(rng: random.Random, valid: Mapping[str, Any] | None) -> bytes:
    if valid is None:
        return b"" if rng.random() < 0.8 else rng.randbytes(rng.randrange(50))
    body = json.loads(json.dumps(valid))
    for name in [name for name in body if rng.random() < 0.3 and name not in ("prompt", "messages", "tokens")]:
        del body[name]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        mutate(rng, body)
    if "max_tokens" not in body and "max_tokens" in valid and rng.random() < 0.95:
        body["max_tokens"] = 1  # else it is all that the context leaves
    encoded = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return changed_bytes(rng, encoded) if rng.random() < 0.1 else encoded


def mutate(rng: random.Random, body: Any) -> None:
    """Change one value, name or entry somewhere in a JSON value."""
    at = body
    while rng.random() < 0.6 and (
        inner := [value for value in values_of(at) if isinstance(value, list | dict) and value]
    ):
        at = rng.choice(inner)
    if isinstance(at, list):
        position = rng.randrange(len(at) + 1)
        at[position : position + rng.randrange(2)] = [rng.choice(ODD_VALUES)(rng)] * rng.choice([1, 1, 1, 40])
        return
    name = (
        rng.choice(list(at))
        if at and rng.random() < 0.85
        else rng.choice(["x", "", "\n", f"a\n{FORGED}\x1b[2J", "tools"])
    )
    if rng.random() < 0.1:
        at.pop(name, None)
    else:
        at[name] = rng.choice(ODD_VALUES)(rng)


def values_of(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def odd_path(rng: random.Random, path: str) -> str:
    return rng.choice(
        [
            path + "/",
            path + "?a=b&a=%00&%ff",
            path.upper(),
            "/" + path,
            path + "%0aFORGED",
            path + "/../metrics",
            "http://other.example" + path,
            "*",
            "/" + random_name(rng),
            "/v1/models/" + "%2e%2e%2f" * rng.randrange(1, 50),
            path + "#fragment",
            path + ";a=b",
            "/" + "a" * rng.randrange(8000),
        ]
    )


def mutated(seed: int, count: int, table: Sequence[Endpoint], *headers: str) -> Iterator[Case]:
    """Return requests that were valid before some of their bytes were changed."""
    valid = list(cases(seed, 200, table, *headers))
    for index in range(count):
        rng = random.Random(f"bytes {seed}/{index}")
        request = changed_bytes(rng, changed_head(rng, rng.choice(valid).request))
        yield Case(request, f"byte seed {seed}, case {index}: {request[:600]!r}")


def changed_head(rng: random.Random, request: bytes) -> bytes:
    """Repeat, drop or add a line of the head; the framing of the body above all."""
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    how = rng.randrange(8)
    if how == 0:
        lines.append(rng.choice(lines))
    elif how == 1:
        del lines[rng.randrange(len(lines))]
    elif how == 2:
        lines.insert(rng.randrange(1, len(lines) + 1), b"Transfer-Encoding: chunked")
    elif how == 3:
        lines.append(
            b"Content-Length: " + rng.choice([b"0", b"1", b"-1", b"+5", b"5, 5", b"99999999999999999999", b"1e3"])
        )
    elif how == 4:
        lines.append(b"Transfer-Encoding: " + rng.choice([b"identity", b"chunked, chunked", b" chunked", b"x"]))
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    elif how == 5:
        lines[0] = rng.choice([b"", b"GET", b"GET /", b"GET / HTTP/1.0", b"GET / HTTP/3", b"\x00 / HTTP/1.1"])
    end = rng.choice([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"])
    return end.join(lines) + end + end + body


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, insert, repeat or cut a few bytes."""
    changed = bytearray(data or b"x")
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(4)
        if how == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif how == 1:
            changed[at:at] = rng.randbytes(rng.randrange(1, 8))
        elif how == 2:
            changed[at:at] = changed[at : at + rng.randrange(1, 200)]
        elif rng.random() < 0.3:
            del changed[at:]
            changed = changed or bytearray(b"x")
    return bytes(changed)
