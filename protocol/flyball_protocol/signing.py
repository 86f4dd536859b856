"""Signatures of the admin port: HMAC-SHA256 (RFC 2104) with the admin token, so that the token itself never travels.

A request carries, in one line, what its signature covers beside its own method and path:

    Authorization: Flyball-HMAC-SHA256 target=10.0.0.5:8001, time=1795318148123, nonce=<32 hex>,
        digest=<64 hex>, signature=<64 hex>

``target`` is the address it is sent to, ``time`` is in milliseconds since the epoch, ``digest`` is the SHA-256 of the body.
Whoever is at that address may copy the request, and can do nothing with it: another replica is another target, the same one has
seen the nonce, and after ``MAX_SKEW_S`` it is too old. The answer is signed for the nonce of its request, in ``ANSWER_HEADER``.
"""

import hashlib
import hmac
import ipaddress
import json
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

SCHEME = "Flyball-HMAC-SHA256"
ANSWER_HEADER = "Flyball-Signature"

MAX_SKEW_S = 60.0
"""Allowed difference of the clocks of operator and replica, and allowed delay of a request."""

MAX_NONCES = 10_000
"""Requests that a replica accepts in twice ``MAX_SKEW_S``. An operator sends a few per minute."""

_HEADER = re.compile(
    rf"{SCHEME} target=(?P<target>[!-+\--~]{{1,128}}), time=(?P<time_ms>\d{{1,15}}), nonce=(?P<nonce>[0-9a-f]{{32}}), "
    r"digest=(?P<digest>[0-9a-f]{64}), signature=(?P<signature>[0-9a-f]{64})",
    re.ASCII,
)


class SignatureError(Exception):
    """A request is refused; the message says why. A caller without the token learns only that the signature is wrong."""


@dataclass(frozen=True)
class SignedRequest:
    """What a signature covers. ``path`` includes the query, as in the request line."""

    method: str
    path: str
    target: str
    time_ms: int
    nonce: str
    digest: str

    def signature(self, token: str) -> str:
        parts = ("request", self.method, self.path, self.target, self.time_ms, self.nonce, self.digest)
        return _hmac(token, parts)

    def header(self, token: str) -> str:
        """Return the value of the Authorization header."""
        return (
            f"{SCHEME} target={self.target}, time={self.time_ms}, nonce={self.nonce}, digest={self.digest}, "
            f"signature={self.signature(token)}"
        )

    def covers(self, body: bytes) -> bool:
        """Return whether ``body`` is the one that was signed."""
        return hmac.compare_digest(self.digest, digest_of(body))


def new_request(method: str, path: str, target: str, body: bytes, time_s: float) -> SignedRequest:
    """Return a request to sign, with a nonce of its own. ``target`` is of ``target_of``; ``time_s`` is wall-clock time."""
    return SignedRequest(method, path, target, int(time_s * 1000), secrets.token_hex(16), digest_of(body))


def target_of(host: str, port: int | None) -> str:
    """Return an address in the form that both sides use: IPv4 in IPv6 as IPv4, IPv6 in its short form."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host.lower()}:{port}"
    plain = getattr(address, "ipv4_mapped", None) or address
    return f"[{plain}]:{port}" if plain.version == 6 else f"{plain}:{port}"


def sign_answer(token: str, nonce: str, status: int, body: bytes) -> str:
    """Return the value of ``ANSWER_HEADER`` for the answer to the request with this nonce."""
    return _hmac(token, ("answer", nonce, status, digest_of(body)))


def is_signed_answer(token: str, nonce: str, status: int, body: bytes, signature: str) -> bool:
    """Return whether an answer was signed with the token for this request. Takes constant time."""
    return hmac.compare_digest(signature.encode(), sign_answer(token, nonce, status, body).encode())


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class Verifier:
    """Accepts each signed request once.

    Args:
        started_s: wall-clock time of this process's start. What was signed before may have been seen by the process before it.
    """

    def __init__(self, token: str, started_s: float) -> None:
        self._token = token
        self._started_s = started_s
        self._seen: set[str] = set()
        self._seen_before: set[str] = set()
        self._turned_s = started_s

    def check(self, header: str, *, method: str, path: str, target: str, now_s: float) -> SignedRequest:
        """Return the request that ``header`` signs; the caller must compare its body.

        Raises:
            SignatureError: not signed with the token, for another method, path or target, at another time, or seen before.
        """
        request = self._read(header, method, path)
        if request.target != target:
            raise SignatureError(f"the request is signed for {request.target}, and this is {target}")
        self._check_time(request.time_ms, now_s)
        self._take(request.nonce, now_s)
        return request

    def _read(self, header: str, method: str, path: str) -> SignedRequest:
        found = _HEADER.fullmatch(header)
        if found is None:
            raise SignatureError(
                f"the {SCHEME} header cannot be read; it has target, time, nonce, digest and signature"
            )
        request = SignedRequest(
            method, path, found["target"], int(found["time_ms"]), found["nonce"], digest=found["digest"]
        )
        if not hmac.compare_digest(found["signature"], request.signature(self._token)):
            raise SignatureError("the signature is not one of this token for this method and path")
        return request

    def _check_time(self, signed_ms: int, now_s: float) -> None:
        signed_s = signed_ms / 1000
        if abs(now_s - signed_s) > MAX_SKEW_S:
            raise SignatureError(
                f"the request was signed at {_utc(signed_s)}, and here it is {_utc(now_s)}; "
                f"{MAX_SKEW_S:g} s apart are allowed. Set the clocks (NTP)"
            )
        if signed_ms < int(self._started_s * 1000):
            raise SignatureError(
                f"the request was signed at {_utc(signed_s)}, before this process started at {_utc(self._started_s)}. "
                "Send a new one; if that does not help, set the clocks (NTP)"
            )

    def _take(self, nonce: str, now_s: float) -> None:
        """Remember a nonce for at least as long as its time is valid, which is from one MAX_SKEW_S before now to one after."""
        if abs(now_s - self._turned_s) >= 2 * MAX_SKEW_S:
            self._seen_before, self._seen, self._turned_s = self._seen, set(), now_s
        if nonce in self._seen or nonce in self._seen_before:
            raise SignatureError("the request was sent before; each is taken once")
        if len(self._seen) >= MAX_NONCES:
            raise SignatureError(f"more than {MAX_NONCES} requests came in {2 * MAX_SKEW_S:g} s; send fewer")
        self._seen.add(nonce)


def _hmac(token: str, parts: tuple[str | int, ...]) -> str:
    message = json.dumps(["flyball-admin-1", *parts])
    return hmac.new(token.encode(), message.encode(), hashlib.sha256).hexdigest()


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
