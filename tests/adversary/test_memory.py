"""What clients may make the server hold for them, all together: bodies that are being received, and prompts that wait."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from adversary_kit.attacked import Attacked, attacked
from adversary_kit.condition import usage
from adversary_kit.raw import connections, post, post_head
from adversary_kit.witness import Seen
from checkpoints import make_checkpoint
from replicas import wait_until

Undisturbed = Callable[[Seen], None]
MB = 1 << 20
BODY_BYTES = 4 * MB
TOTAL_BODY_BYTES = 64 * MB
NUM_SENDERS = 40


def test_bodies_that_never_end_are_bounded_together(server: Attacked, undisturbed: Undisturbed) -> None:
    before = usage(server.pids)
    almost_all = post_head("/v1/completions", BODY_BYTES) + b" " * (BODY_BYTES - 1)

    def attack() -> None:
        with connections(server.port, NUM_SENDERS) as opened:
            for connection in opened:
                connection.settimeout(5)
                with contextlib.suppress(OSError):  # some are refused
                    connection.sendall(almost_all)
            held = usage(server.pids).rss_bytes - before.rss_bytes
            assert held < 2 * TOTAL_BODY_BYTES, f"{held} bytes of {NUM_SENDERS * BODY_BYTES} sent are held"
            assert server.post("/v1/completions", b'{"prompt": "a"}' + b" " * (BODY_BYTES - 100)).status == 200

    undisturbed(server.under(attack))


MAX_MODEL_LEN = 1 << 20
MANY = 900_000


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server of a model that takes prompts of a million tokens."""
    folder = tmp_path_factory.mktemp("roomy")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 4}
    model = make_checkpoint(folder, "qwen2", max_position_embeddings=MAX_MODEL_LEN, **sizes)
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", "320MiB")
    with attacked(model, folder / "server.log", *flags) as server:
        yield server


def ids(count: int) -> bytes:
    """Token ids in JSON, in two digits each: a million of them fit into a body."""
    return b",".join(b"%d" % (10 + index % 89) for index in range(count))


@pytest.mark.slow
def test_a_prompt_of_nearly_a_million_ids_stops_nobody(roomy: Attacked, undisturbed: Undisturbed) -> None:
    request = post("/v1/completions", b'{"prompt":[%b],"max_tokens":1}' % ids(MANY))

    def attack() -> None:
        with connections(roomy.port) as (connection,):
            connection.sendall(request)
            wait_until(lambda: roomy.server.load()[2] > MANY // 16, "it was not admitted")
        wait_until(lambda: roomy.server.load()[0] <= 1, "it goes on")

    undisturbed(roomy.under(attack))


@pytest.mark.slow
def test_prompts_that_never_fit_or_that_wait_are_bounded(roomy: Attacked) -> None:
    before = usage(roomy.pids)
    with roomy.unharmed():
        answer = roomy.post("/v1/completions", b'{"prompt":[%b],"n":256}' % ids(100_000))
        assert (answer.status, answer.code) == (400, "too_many_prompt_tokens")
        request = post("/v1/completions", b'{"prompt":[%b],"n":40}' % ids(100_000))
        with connections(roomy.port, 8) as (first, *others):
            first.sendall(request)
            wait_until(lambda: sum(roomy.server.load()[:2]) == 40, "it was not taken")
            for connection in others:
                connection.sendall(request)
            assert [connection.recv(12)[9:] for connection in others] == [b"429"] * 7
            held = usage(roomy.pids).rss_bytes - before.rss_bytes
            assert held < 1024 * MB, f"{held} bytes"
