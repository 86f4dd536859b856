"""A server under attack: a real `flyball serve`, what it must be like afterwards, and how its other clients fare."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from adversary_kit.condition import Usage, log_problems, usage
from adversary_kit.raw import Answer, ask, post
from adversary_kit.witness import Seen, least_disturbed, witness
from flyball_protocol import endpoints
from replicas import Replica, wait_until

FLAGS = ("--max-model-len", "2048", "--max-num-batched-tokens", "256", "--max-num-seqs", "64")
"""A context that the witness' stream fills in some seconds, and steps that are short whatever they compute."""

KNOWN = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Attacked:
    """A running server and what it was like before.

    Attributes:
        texts: of the witness' streams so far; all begin alike, for all are greedy answers to one prompt.
    """

    def __init__(self, server: Replica) -> None:
        self.server = server
        self.port, self.admin_port = server.port, server.admin_port
        self.known_text = self.known_answer()
        self.texts: list[str] = []

    @property
    def pids(self) -> list[int]:
        """The API process and the engine process."""
        return [self.server.process.pid, self.server.engine_pid()]

    @property
    def is_running(self) -> bool:
        return self.server.process.poll() is None

    def known_answer(self) -> str:
        """Ask as a client of its own, which has a share of a queue that the attack has filled."""
        answer = self.server.client.post("/v1/completions", json=KNOWN, headers={"Authorization": "Bearer known"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def post(self, path: str, body: object, *headers: str) -> Answer:
        """Send a request on a connection of its own; there must be an answer."""
        answer = ask(self.port, post(path, body, *headers))
        assert answer is not None, "the connection was closed without an answer"
        return answer

    def log_since(self, offset: int) -> bytes:
        with self.server.log.open("rb") as log:
            log.seek(offset)
            return log.read()

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """Check after the block that the server lives, is idle, answers as before, and has what it had before."""
        before, log_bytes = usage(self.pids), self.server.log.stat().st_size
        yield
        assert self.is_running, (
            f"the server ended with {self.server.process.poll()}:\n{self.log_since(log_bytes)[-3000:]!r}"
        )
        self._check_idle()
        assert self.known_answer() == self.known_text
        self._check_usage(before)
        problems = log_problems(self.log_since(log_bytes))
        assert not problems, "\n".join(problems)

    def _check_idle(self) -> None:
        for path in (endpoints.LIVEZ_PATH, endpoints.READYZ_PATH):
            wait_until(lambda path=path: self.server.client.get(path).status_code == 200, path)  # type: ignore[misc]
        wait_until(lambda: self.server.load() == (0, 0, 0), "requests and their KV blocks stay")

    def _check_usage(self, before: Usage) -> None:
        try:
            wait_until(lambda: usage(self.pids).is_near(before), "")
        except TimeoutError:
            raise AssertionError(f"before it had {before}, now {usage(self.pids)}") from None

    def under(self, attack: Callable[[], None]) -> Seen:
        """Attack while another client streams, up to some times; return how that client fared in the best round."""
        return least_disturbed(lambda: self.watched(attack))

    def watched(self, attack: Callable[[], None]) -> Seen:
        """Attack once while another client streams; that client must get the tokens that it always gets."""
        with witness(self.port, self.pids) as seen:
            attack()
        seen.check_answers(self.texts)
        return seen


@contextlib.contextmanager
def attacked(model: Path, log: Path, *flags: str) -> Iterator[Attacked]:
    """A ready server for attacks; killed at the end."""
    server = Replica(model, *FLAGS, *flags, log=log)
    try:
        server.wait_ready()
        yield Attacked(server)
    finally:
        server.close()
