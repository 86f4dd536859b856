"""Outputs under random JSON schemas, regular expressions, choices and grammars at temperature 1, each checked by a validator.

jsonschema, re and Lark know nothing of the library that Flyball forms outputs with. Every form has short outputs only, so
that none is cut: each of the outputs has to end by itself and to be valid.
"""

import json
import os
import random
import re
import string
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

import jsonschema
import lark

NUM_FORMS, NUM_CHOICES, MAX_TOKENS = 250, 4, 220
Check = Callable[[str], bool]
Form = tuple[dict[str, Any], Check]
"""The fields that ask for it, and what says whether an output is valid."""


def word(rng: random.Random, letters: str = string.ascii_lowercase, most: int = 6) -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, most)))


def integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "multipleOf": 0.25, "minimum": -rng.randint(0, 9), "exclusiveMaximum": rng.randint(1, 99)}


def text(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}


def pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{regex(rng, 1)}$"}


def formatted(rng: random.Random, depth: int) -> dict[str, Any]:
    """No dates: RFC 3339 has a year 0000, jsonschema's check of it has not."""
    return {"type": "string", "format": rng.choice(["ipv4", "ipv6", "uuid"])}


def enumeration(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [word(rng, string.printable), rng.randint(-9, 9), None, True, 1.5, [1, "a"], {"é": "ü"}]
    return {"enum": rng.sample(values, rng.randint(1, len(values)))}


def array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        items = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randint(0, len(items))}
    least = rng.randint(0, 2)
    return {"type": "array", "items": schema(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def object_(rng: random.Random, depth: int) -> dict[str, Any]:
    names = list({word(rng, string.ascii_letters + ' "\\é_-') for _ in range(rng.randint(1, 4))})
    return {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def both(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(1, 99)}]}


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    flat = [integer, number, text, pattern, formatted, enumeration, both, lambda *_: {"type": ["boolean", "null"]}]
    return rng.choice(flat if depth <= 0 else [array, object_, object_, either, *flat[:4]])(rng, depth)


def regex(rng: random.Random, depth: int) -> str:
    atoms = [f"[{rng.choice(['a-f', 'A-Z0-9', '^a-y0-9', 'äöü'])}]", r"\d", r"\w", re.escape(word(rng)), "."]
    if depth > 0:
        atoms += [f"({regex(rng, depth - 1)}|{regex(rng, depth - 1)})", f"(?:(?:{regex(rng, depth - 1)})?)"]
    repeats = ["", "", "?", "{2}", "{0,2}", "{1,3}"]
    return "".join(rng.choice(atoms) + rng.choice(repeats) for _ in range(rng.randint(1, 4)))


def grammar(rng: random.Random) -> str:
    """A context-free grammar whose rules refer to later ones only, so that its outputs are finite."""
    num_rules = rng.randint(2, 6)
    rules = []
    for index in range(num_rules):
        later = [f"rule{other}" for other in range(index + 1, num_rules)]
        parts = [json.dumps(word(rng, string.ascii_letters + "(),+ é")) for _ in range(3)] + [f"/[{word(rng)}]{{1,3}}/"]
        bodies = [" ".join(rng.sample(parts + later, rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
        bodies.append(f"{rng.choice(parts)} ({' | '.join(rng.sample(parts, 2))})? {rng.choice(later or parts)}")
        rules.append(f"rule{index}: " + " | ".join(bodies))
    return "\n".join(["start: rule0", *rules])


def schema_form(rng: random.Random) -> Form:
    """With any space between tokens, of which small models print a lot, schemas are flatter."""
    space = rng.choice([None, {"disable_any_whitespace": True}, {"whitespace_pattern": "[ \n]?"}])
    wanted = schema(rng, 1 if space is None else 2)
    jsonschema.Draft202012Validator.check_schema(wanted)
    validator = jsonschema.Draft202012Validator(wanted, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)

    def check(output: str) -> bool:
        try:
            return validator.is_valid(json.loads(output))
        except json.JSONDecodeError:
            return False

    if space is not None:
        return {"structured_outputs": {"json": wanted} | space}, check
    named = {"name": "x", "strict": True, "schema": wanted}
    return {"response_format": {"type": "json_schema", "json_schema": named}}, check


def regex_form(rng: random.Random) -> Form:
    wanted = regex(rng, 2)
    return {"structured_outputs": {"regex": wanted}}, lambda output: re.fullmatch(wanted, output) is not None


def choice_form(rng: random.Random) -> Form:
    wanted = [word(rng, string.printable + "éß漢😀", most=12) for _ in range(rng.randint(1, 40))]
    return {"structured_outputs": {"choice": wanted}}, lambda output: output in wanted


def grammar_form(rng: random.Random) -> Form:
    wanted = grammar(rng)
    parser = lark.Lark(wanted)

    def check(output: str) -> bool:
        try:
            return parser.parse(output) is not None
        except lark.exceptions.UnexpectedInput:
            return False

    return {"structured_outputs": {"grammar": wanted}}, check


MAKERS = [schema_form, schema_form, regex_form, choice_form, grammar_form]


def ask(fields: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    body = {
        "messages": [{"role": "user", "content": f"Write down number {seed}."}],
        "temperature": 1,
        "max_tokens": MAX_TOKENS,
        "n": NUM_CHOICES,
        "seed": seed,
    }
    headers = {"Authorization": f"Bearer {os.environ['API_KEY']}", "Content-Type": "application/json"}
    data = json.dumps(body | fields).encode()
    with urlopen(Request(f"{os.environ['BASE_URL']}/chat/completions", data, headers), timeout=600) as answer:
        choices: list[dict[str, Any]] = json.load(answer)["choices"]
    return choices


def main() -> int:
    rng = random.Random(1)
    makers = MAKERS * (NUM_FORMS // len(MAKERS))
    forms = [make(rng) for make in makers]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, (fields for fields, _ in forms), range(NUM_FORMS)))
    made: Counter[str] = Counter()
    valid: Counter[str] = Counter()
    for make, (fields, check), choices in zip(makers, forms, answers, strict=True):
        for choice in choices:
            output = choice["message"]["content"]
            is_valid = choice["finish_reason"] == "stop" and check(output)
            made[make.__name__] += 1
            valid[make.__name__] += is_valid
            if not is_valid:
                print(f"{choice['finish_reason']}: {output!r} does not fit {json.dumps(fields)}")
    print(f"{valid.total()} of {made.total()} outputs are valid: {dict(valid)}")
    return 0 if valid.total() == made.total() == NUM_FORMS * NUM_CHOICES else 1


sys.exit(main())
