"""The admin ports of a model's pods, spoken to as the operator does."""

import time
import urllib.request
from dataclasses import dataclass

import msgspec

from e2e_kit.models import Model
from flyball_protocol import Evidence, LimitsAck, LimitsReport, decode_evidence, signing
from flyball_protocol.endpoints import ADMIN_EVIDENCE_PATH, ADMIN_LIMITS_PATH, ADMIN_PORT, ADMIN_TOKEN_ENV


@dataclass(frozen=True)
class AdminPort:
    """One pod's."""

    ip: str
    token: str

    def limits(self) -> LimitsReport:
        return msgspec.json.decode(self._ask(), type=LimitsReport)

    def set_limits(self, revision: int, **limits: int) -> LimitsAck:
        body = msgspec.json.encode({"revision": revision, "limits": limits})
        return msgspec.json.decode(self._ask(body), type=LimitsAck)

    def evidence(self) -> Evidence:
        return decode_evidence(self._ask(path=ADMIN_EVIDENCE_PATH))

    def _ask(self, body: bytes | None = None, *, path: str = ADMIN_LIMITS_PATH) -> bytes:
        method, target = "GET" if body is None else "POST", signing.target_of(self.ip, ADMIN_PORT)
        signed = signing.new_request(method, path, target, body or b"", time.time())
        headers = {"Authorization": signed.header(self.token), "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{target}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: bytes = answer.read()
            signature = answer.headers[signing.ANSWER_HEADER]
            assert signing.is_signed_answer(self.token, signed.nonce, answer.status, found, signature)
            return found


def admin_ports(model: Model) -> list[AdminPort]:
    token = _token(model)
    return [AdminPort(pod["status"]["podIP"], token) for pod in model.ready_pods()]


def _token(model: Model) -> str:
    pod = model.ready_pods()[0]["spec"]["containers"][0]
    (reference,) = (one["valueFrom"]["secretKeyRef"] for one in pod["env"] if one["name"] == ADMIN_TOKEN_ENV)
    template = f"{{{{.data.{reference['key']} | base64decode}}}}"
    return model.kubectl("get", "secret", reference["name"], "-o", f"go-template={template}")
