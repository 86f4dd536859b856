"""A `flyball local` whose machine or manifest fails it: what runs goes on, and the reason is told once."""

import time
from pathlib import Path

import pytest

from adversary_kit.instance import Instance, instance
from adversary_kit.manifests import REFUSED, TAKEN
from adversary_kit.raw import connect, connections, is_closed_within

TUNING = {
    "mode": "Auto",
    "objectives": {"interTokenLatencyP95Milliseconds": 40},
    "intervalSeconds": 1,
}
TUNED = {"tuning": TUNING, "env": {"FAKE_ITL_OVER": "4000"}}
"""Every round is a decision."""

HELD_S = 3
"""Long enough for a few rounds of tuning and probes without a file handle."""

HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-A"
FAST = {
    "a date that is none",
    "an integer of 5,000 digits",
    "a NUL",
    "an alias bomb in the pod",
    "a pod that is itself",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, id=n, marks=[] if n in FAST else [pytest.mark.slow]) for n in REFUSED]
)
def test_a_bad_manifest_is_not_taken(running: Instance, name: str) -> None:
    before = running.said().count("not taken")
    running.manifest.write_text(REFUSED[name])
    running.reload()
    running.wait_said("not taken", before + 1)
    assert running.client.post("/v1/completions", json={}).status_code == 200


@pytest.mark.parametrize("name", TAKEN)
def test_an_odd_manifest_ends_nothing(running: Instance, name: str) -> None:
    running.manifest.write_text(TAKEN[name])
    running.reload()
    assert running.client.post("/v1/completions", json={}).status_code == 200


def a_full_disk(log_dir: Path) -> None:
    (log_dir / "decisions.jsonl").symlink_to("/dev/full")


def a_folder_in_its_place(log_dir: Path) -> None:
    (log_dir / "decisions.jsonl").mkdir()


@pytest.mark.slow
@pytest.mark.parametrize("breaking", [a_full_disk, a_folder_in_its_place])
def test_decisions_that_cannot_be_written_end_nothing(breaking: object) -> None:
    with instance(before_start=breaking, **TUNED) as running, running.unharmed():  # type: ignore[arg-type]
        running.wait_said("decisions.jsonl")
        running.wait_said("tuning, revision")  # not the first round, and not the last
        assert sum("decisions.jsonl" in line for line in running.said().splitlines()) == 1, running.said()
        assert running.client.post("/v1/completions", json={}).status_code == 200


@pytest.mark.slow
def test_half_sent_heads_use_up_the_file_handles_and_end_nothing() -> None:
    with instance(max_fds=160, **TUNED) as running, running.unharmed():
        with connections(running.port, 250) as opened:
            for connection in opened:
                connection.sendall(HALF_A_HEAD)
            for _ in range(HELD_S * 10):
                assert running.process.poll() is None, running.said()[-3000:]
                time.sleep(0.1)
        assert running.client.post("/v1/completions", json={}).status_code == 200


@pytest.mark.slow
def test_half_sent_heads_are_cut_off(running: Instance) -> None:
    with connections(running.port, 100) as opened:
        for connection in opened:
            connection.sendall(HALF_A_HEAD)
        for connection in opened:
            assert is_closed_within(connection, 30)


@pytest.mark.slow
def test_a_head_that_drips_in_is_cut_off(running: Instance) -> None:
    """The time runs from a head's first byte, not from its last."""
    with connect(running.port) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n")
        deadline_s = time.monotonic() + 40
        with pytest.raises(ConnectionError):
            while time.monotonic() < deadline_s:
                connection.sendall(b"X-A: b\r\n")
                time.sleep(0.2)
