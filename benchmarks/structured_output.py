"""What structured output costs, and which library does it at the lower price.

    python benchmarks/structured_output.py [--model examples/demo_model/checkpoint] [--outputs 1000]

1. llguidance and, if it is installed, xgrammar: seconds to load a vocabulary, to compile each of fifty schemas, and to fill
   a mask along random outputs, for vocabularies of 4,000 and 150,000 made-up tokens. Each in a process of its own, with
   the memory that it takes there.
2. Outputs of a model under those schemas, of which each has to be valid: tokens a second with and without schemas, and the
   seconds until the schemas were compiled.

Writes results/structured_output.json.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common import save
from json_schemas import schemas

ROOT = Path(__file__).parent.parent
VOCABULARIES = {"4k": 4_000, "150k": 150_000}
MAX_STEPS = 200
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(file: Path, num_tokens: int) -> None:
    """Write a byte-level tokenizer: all bytes, words with and without a space before them, and pieces of JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(num_tokens)
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocabulary) < num_tokens - 1:
        letters, most = (LETTERS, 9) if rng.random() < 0.9 else ('{}[]":,.0123456789-Ġ_', 4)
        word = "".join(rng.choice(letters) for _ in range(rng.randint(2, most)))
        vocabulary.setdefault(rng.choice(("", "Ġ")) + word, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(file))


def follow(
    fill: Callable[[], np.ndarray], take: Callable[[int], bool], end_id: int, rng: random.Random
) -> Iterator[float]:
    """Yield the seconds of each mask along a random output."""
    for _ in range(MAX_STEPS):
        started_s = time.perf_counter()
        mask = fill()
        yield time.perf_counter() - started_s
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        chosen = int(rng.choice(allowed))
        if chosen == end_id or not take(chosen):
            return


class Llguidance:
    def __init__(self, file: Path, num_tokens: int) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self._matcher = LLMatcher
        self._tokenizer = LLTokenizer(str(file), n_vocab=num_tokens, eos_token=num_tokens - 1)
        self._mask = np.zeros(-(-num_tokens // 32), np.int32)

    def compile(self, schema: str) -> Any:
        matcher = self._matcher(self._tokenizer, self._matcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def masks(self, compiled: Any, end_id: int, rng: random.Random) -> Iterator[float]:
        matcher = compiled.deep_copy()

        def fill() -> np.ndarray:
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            return self._mask

        return follow(fill, matcher.consume_token, end_id, rng)


class Xgrammar:
    def __init__(self, file: Path, num_tokens: int) -> None:
        import xgrammar
        from tokenizers import Tokenizer

        self._library = xgrammar
        vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
        info = xgrammar.TokenizerInfo(
            sorted(vocabulary, key=vocabulary.__getitem__),
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=num_tokens,
            stop_token_ids=[num_tokens - 1],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, num_tokens)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema)

    def masks(self, compiled: Any, end_id: int, rng: random.Random) -> Iterator[float]:
        matcher = self._library.GrammarMatcher(compiled)

        def fill() -> np.ndarray:
            matcher.fill_next_token_bitmask(self._mask)
            return self._mask.numpy()[0]

        return follow(fill, matcher.accept_token, end_id, rng)


LIBRARIES = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def measure_library(name: str, file: Path, num_tokens: int) -> dict[str, Any]:
    started_s = time.perf_counter()
    library = LIBRARIES[name](file, num_tokens)
    load_s = time.perf_counter() - started_s
    compile_s, mask_s, refused = [], [], []
    for label, schema in schemas().items():
        started_s = time.perf_counter()
        try:
            compiled = library.compile(json.dumps(schema))
        except (ValueError, RuntimeError) as error:
            refused.append(f"{label}: {str(error)[:100]}")
            continue
        compile_s.append(time.perf_counter() - started_s)
        mask_s += [one for seed in range(3) for one in library.masks(compiled, num_tokens - 1, random.Random(seed))]
    return {
        "load_s": load_s,
        "compile_ms": summary(compile_s, 1e3),
        "mask_us": summary(mask_s, 1e6),
        "num_masks": len(mask_s),
        "refused": refused,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def summary(seconds: list[float], unit: float) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99}
    return {
        "mean": unit * statistics.mean(ordered),
        **{name: unit * ordered[int(share * len(ordered))] for name, share in at.items()},
        "max": unit * ordered[-1],
    }


def libraries() -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size, num_tokens in VOCABULARIES.items():
            file = Path(folder) / f"{size}.json"
            make_tokenizer(file, num_tokens)
            for name in LIBRARIES:
                command = [sys.executable, __file__, "--measure", name, str(file), str(num_tokens)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                failed = (done.stderr.strip().splitlines() or ["?"])[-1]
                results[f"{name} {size}"] = json.loads(done.stdout) if done.returncode == 0 else {"failed": failed}
                print(f"{name} {size}: {json.dumps(results[f'{name} {size}'], indent=1)}", flush=True)
    return results


def outputs(model: Path, num_outputs: int) -> dict[str, Any]:
    import jsonschema

    from flyball_runtime.core.grammar import Grammar
    from flyball_runtime.core.sampling_params import SamplingParams
    from flyball_runtime.llm import LLM

    llm = LLM(model, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=1024)
    all_schemas = list(schemas().values())
    chosen = [all_schemas[index % len(all_schemas)] for index in range(num_outputs)]
    plain = [SamplingParams(max_tokens=900, seed=seed) for seed in range(num_outputs)]
    constrained = [
        SamplingParams(max_tokens=900, seed=seed, grammar=Grammar("json", json.dumps(schema), ""))
        for seed, schema in enumerate(chosen)
    ]
    prompts = [f"Write record {index} as JSON." for index in range(num_outputs)]
    first_s, _ = timed(llm, prompts[: len(all_schemas)], constrained[: len(all_schemas)])
    again_s, _ = timed(llm, prompts[: len(all_schemas)], constrained[: len(all_schemas)])
    seconds, answers = timed(llm, prompts, constrained)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    # the same load without schemas: as many tokens for each prompt
    lengths = [
        SamplingParams(max_tokens=len(answer.token_ids), seed=one.seed, ignore_eos=True)
        for answer, one in zip(answers, plain, strict=True)
    ]
    plain_s, _ = timed(llm, prompts, lengths)
    invalid = [index for index, answer in enumerate(answers) if not is_valid(answer.text, chosen[index], jsonschema)]
    return {
        "outputs": num_outputs,
        "valid": num_outputs - len(invalid),
        "cut": sum(answer.finish_reason == "length" for answer in answers),
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_s_without_schemas": num_tokens / plain_s,
        "us_per_token": 1e6 * (seconds - plain_s) / num_tokens,
        "compile_s_of_all_schemas": first_s - again_s,
    }


def timed(llm: Any, prompts: list[str], settings: list[Any]) -> tuple[float, list[Any]]:
    started_s = time.perf_counter()
    answers = llm.generate(prompts, settings)
    return time.perf_counter() - started_s, answers


def is_valid(text: str, schema: dict[str, Any], jsonschema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model" / "checkpoint")
    parser.add_argument("--outputs", type=int, default=1000)
    parser.add_argument("--measure", nargs=3, metavar=("LIBRARY", "TOKENIZER", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, file, num_tokens = args.measure
        print(json.dumps(measure_library(name, Path(file), int(num_tokens))))
        return
    result = {"libraries": libraries(), "outputs": outputs(args.model, args.outputs)}
    print(json.dumps(result["outputs"], indent=1))
    save("structured_output", result)


if __name__ == "__main__":
    main()
