"""Grammars compile, or are refused by name; the cache keeps what is used."""

import gc
import json
from pathlib import Path

import pytest

from checkpoints import EOS_ID, TURN_END_ID, make_checkpoint
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.grammar import ANY_OBJECT, Grammar
from flyball_runtime.grammar import cache as cache_module
from flyball_runtime.grammar.cache import GrammarCache
from flyball_runtime.grammar.compiler import CompiledGrammar, GrammarCompiler, lowered

CHECKPOINT = Path(__file__).parents[3] / "examples" / "demo_model" / "checkpoint"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    compiler = GrammarCompiler.of_checkpoint(CHECKPOINT)
    assert compiler is not None
    return compiler


def schema(**fields: object) -> Grammar:
    return Grammar("json", json.dumps(fields))


def nested(depth: int) -> Grammar:
    text = '{"type": "string"}'
    for _ in range(depth):
        text = f'{{"type": "object", "properties": {{"a": {text}}}, "required": ["a"]}}'
    return Grammar("json", text)


def takes(compiled: CompiledGrammar, compiler: GrammarCompiler, text: str) -> bool:
    """Whether the grammar takes this text and may end there."""
    matcher = compiled.matcher()
    ids = compiler.tokenize(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "fits", "fails"),
    [
        (schema(type="integer", minimum=3), ["3", "40"], ["2", '"3"']),
        (ANY_OBJECT, ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": "é"\n}'], ["[]", "{'a': 1}", "{} {}"]),
        (Grammar("json", '{"type": "array"}', ""), ["[1,2]"], ["[1, 2]"]),
        (Grammar("json", '{"type": "array"}', " ?"), ["[1, 2]"], ["[1,  2]"]),
        (Grammar("regex", r"(ab)+|\d{2}"), ["abab", "12"], ["aba", "1"]),
        (Grammar("regex", r"^x$"), ["x"], ["xx"]),
        (Grammar("choice", json.dumps(['a"b\\c\n', " sp", "/x/", "é", "1{2}"])), ['a"b\\c\n', " sp", "é"], ["a", "/x"]),
        (Grammar("grammar", 'start: "a" start | "b"'), ["b", "aab"], ["aa", ""]),
        (Grammar("grammar", 'root ::= "x" | "y" root'), ["x", "yyx"], ["y"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_kinds(compiler: GrammarCompiler, grammar: Grammar, fits: list[str], fails: list[str]) -> None:
    for form in (grammar, lowered(grammar)):
        compiled = compiler.compile(form)
        assert [text for text in fits if not takes(compiled, compiler, text)] == []
        assert [text for text in fails if takes(compiled, compiler, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema(type="strng"), "Invalid type: strng"),
        (schema(type="string", minLength=5, maxLength=2), "Unsatisfiable schema"),
        (schema(allOf=[{"type": "string"}, {"type": "integer"}]), "Unsatisfiable schema"),
        ({"$ref": "#"}, "goes on for ever"),
        (schema(type="object", properties={"a": {"$ref": "#"}}, required=["a"]), "goes on for ever"),
        (schema(type="array", uniqueItems=True), 'Unimplemented keys: ["uniqueItems"]'),
        ({"$ref": "https://example.com/x.json"}, "https://example.com/x.json"),
        (nested(500), "recursion limit"),
        (Grammar("json", "[1"), ""),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", r"(a)\1"), "backreferences are not supported"),
        (Grammar("regex", r"[^\s\S]"), "no output can satisfy it"),
        (Grammar("grammar", 'foo: "a"'), "Expected ::="),
        (Grammar("grammar", "start: bar"), "unknown name"),
        (Grammar("grammar", 'start: "a" start'), "goes on for ever"),
        (Grammar("grammar", 'root ::= ("a" | "b") root'), "goes on for ever"),
        (Grammar("grammar", "start: " + "(" * 10_000), "too deeply nested"),
        (Grammar("grammar", "root ::= " + "(a | " * 10_000), "recursion"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused(compiler: GrammarCompiler, grammar: object, reason: str) -> None:
    grammar = grammar if isinstance(grammar, Grammar) else Grammar("json", json.dumps(grammar))
    with pytest.raises(InvalidRequest) as refused:
        compiler.try_out(grammar)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 500
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "grammar",
    [
        nested(30),
        schema(enum=[f"value {index}" for index in range(10_000)]),
        Grammar("choice", json.dumps([f"value {index}" for index in range(10_000)])),
        Grammar("regex", "(a+)+$"),
        Grammar("regex", "(x+x+)+y"),
    ],
    ids=lambda grammar: grammar.text[:20],
)
@pytest.mark.slow
def test_what_is_large_is_fine(compiler: GrammarCompiler, grammar: Grammar) -> None:
    assert compiler.try_out(grammar).kind == "compiled"


def test_end_ids_of_the_model_end_a_grammar(tmp_path: Path) -> None:
    compiler = GrammarCompiler.of_checkpoint(make_checkpoint(tmp_path, "llama2"))
    assert compiler is not None
    matcher = compiler.compile(Grammar("regex", "a*")).matcher()
    mask = matcher.compute_bitmask()
    assert mask[0] == 1 << EOS_ID | 1 << TURN_END_ID


def test_a_checkpoint_without_a_vocabulary_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert GrammarCompiler.of_checkpoint(tmp_path) is None
    (tmp_path / "config.json").write_bytes((CHECKPOINT / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    assert GrammarCompiler.of_checkpoint(tmp_path) is None
    assert "no structured output" in caplog.text
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        GrammarCache(None).compile(ANY_OBJECT).result(timeout=60)


def test_the_cache_keeps_what_is_held_and_the_latest(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_CACHED_BYTES", 1)  # room for the latest one only
    cache = GrammarCache(compiler)
    held = cache.compile(Grammar("regex", "a")).result(timeout=60)
    cache.compile(Grammar("regex", "b")).result(timeout=60)
    cache.compile(Grammar("regex", "c")).result(timeout=60)
    gc.collect()
    assert cache.compile(Grammar("regex", "a")).done()
    assert cache.get(Grammar("regex", "a")) is held
    assert cache.compile(Grammar("regex", "c")).done()
    assert not cache._held.get(Grammar("regex", "b"))
