"""Grammars are tried out in another process, which bounds what they can do."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flyball_runtime.core.errors import FlyballError, GrammarsBusy, GrammarsUnavailable, InvalidRequest
from flyball_runtime.core.grammar import ANY_OBJECT, Grammar
from flyball_runtime.grammar import checker as checker_module
from flyball_runtime.grammar.checker import GrammarChecker

CHECKPOINT = Path(__file__).parents[3] / "examples" / "demo_model" / "checkpoint"
WAIT_S = 300


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(CHECKPOINT, timeout_s=1.0)
    yield checker
    checker.close()


def chain(length: int) -> Grammar:
    """A schema whose objects nest through references, which the compiler follows by recursion."""
    node = {"type": "object", "required": ["a"]}
    definitions = {
        f"r{index}": node | {"properties": {"a": {"$ref": f"#/$defs/r{index + 1}"}}} for index in range(length)
    }
    text = json.dumps({"$defs": definitions | {f"r{length}": {"type": "null"}}, "$ref": "#/$defs/r0"})
    return Grammar("json", text)


SLOW = Grammar(
    "json",
    json.dumps({"allOf": [{"type": "string", "pattern": f"(.*a.{{{index}}}b)"} for index in range(1, 30)]}),
)


def test_a_grammar_comes_back_compiled_and_is_remembered(checker: GrammarChecker) -> None:
    first = checker.check(ANY_OBJECT).result(WAIT_S)
    assert first.kind == "compiled"
    again = checker.check(ANY_OBJECT)
    assert again.done() and again.result() == first


def test_a_refusal_is_remembered(checker: GrammarChecker) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed group"):
            checker.check(Grammar("regex", "(a")).result(WAIT_S)
    assert checker.check(Grammar("regex", "(a")).done()


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param(SLOW, id="takes minutes", marks=pytest.mark.slow),
        pytest.param(chain(2000), id="overflows the stack"),
    ],
)
def test_what_hangs_or_crashes_is_refused_and_the_next_is_served(checker: GrammarChecker, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        checker.check(grammar).result(WAIT_S)
    assert checker.check(Grammar("regex", str(len(grammar.text)))).result(WAIT_S)


def test_a_killed_worker_is_replaced(checker: GrammarChecker) -> None:
    checker.check(Grammar("regex", "k")).result(WAIT_S)
    for worker in checker._idle:
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
    assert checker.check(Grammar("regex", "k1")).result(WAIT_S)


def test_too_many_that_wait_are_refused(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    while checker._room.acquire(blocking=False):
        taken += 1
    try:
        with pytest.raises(GrammarsBusy, match=str(checker_module.MAX_WAITING)):
            checker.check(Grammar("regex", "b"))
    finally:
        checker._room.release(taken)
    assert checker.check(Grammar("regex", "b")).result(WAIT_S)


def test_a_worker_that_does_not_start_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")  # and no config.json
    checker = GrammarChecker(tmp_path, timeout_s=5.0)
    with pytest.raises(GrammarsUnavailable):
        checker.check(ANY_OBJECT).result(WAIT_S)
    checker.close()


def test_close_ends_what_runs() -> None:
    checker = GrammarChecker(CHECKPOINT, timeout_s=60.0)
    running = checker.check(SLOW)
    checker.close()
    assert running.done()
    assert running.cancelled() or isinstance(running.exception(), FlyballError)


def test_close_ends_a_worker_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_ready = checker_module._Worker.wait_ready

    def closed_meanwhile(worker: checker_module._Worker) -> None:
        worker.kill()
        wait_ready(worker)

    monkeypatch.setattr(checker_module._Worker, "wait_ready", closed_meanwhile)
    checker = GrammarChecker(CHECKPOINT, timeout_s=60.0)
    with pytest.raises(GrammarsUnavailable):
        checker.check(SLOW).result(WAIT_S)
    checker.close()
