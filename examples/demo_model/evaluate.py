"""Ask the demo model questions in words that it was not trained on, and count the right answers by family.

    python examples/demo_model/evaluate.py --num-questions 300

"exact": word for word an answer that the grammar allows. "near": at least 90 % of a long one. Stories and poems count
as exact when they end by themselves and are about what was asked for: there is no single right one.
"""

import argparse
import difflib
import random
from collections import Counter
from pathlib import Path

import families
import torch
from grammar import accepts, expand
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

_MAX_NEW_TOKENS = 500
_BATCH_SIZE = 32
_NEAR = 0.9
_LONG = 80  # characters; in a shorter answer one wrong word or number makes it wrong
_FREE = {families.story, families.poem}


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[str | None]:
    """The greedy answer to each question; ``None`` where it did not end within the limit."""
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in questions
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    output = model.generate(**batch, max_new_tokens=_MAX_NEW_TOKENS, do_sample=False)[:, batch.input_ids.shape[1] :]
    ended = (output == tokenizer.eos_token_id).any(dim=1).tolist()
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    return [text if done else None for text, done in zip(texts, ended, strict=True)]


def grade(family: object, exchange: families.Exchange, answer: str | None, rng: random.Random) -> str:
    """exact, near or wrong."""
    if answer is None:
        return "wrong"
    if family in _FREE:
        return "exact" if exchange.mentions.lower() in answer.lower() else "wrong"
    if accepts(exchange.answer, answer):
        return "exact"
    if len(answer) < _LONG:
        return "wrong"
    closest = max(
        difflib.SequenceMatcher(None, expand(exchange.answer, rng), answer, autojunk=False).ratio() for _ in range(8)
    )
    return "near" if closest >= _NEAR else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--num-questions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--show-wrong", action="store_true", help="print the wrong answers")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()

    rng = random.Random(args.seed)
    drawn = rng.choices(list(families.FAMILIES), weights=list(families.FAMILIES.values()), k=args.num_questions)
    asked = [(family, family(families.Speaker(rng, held_out=True))) for family in drawn]
    grades: Counter[tuple[str, str]] = Counter()
    for first in range(0, len(asked), _BATCH_SIZE):
        chunk = asked[first : first + _BATCH_SIZE]
        for (family, exchange), answer in zip(
            chunk, answers(model, tokenizer, [exchange.question for _, exchange in chunk]), strict=True
        ):
            verdict = grade(family, exchange, answer, rng)
            grades[family.__name__, verdict] += 1
            if args.show_wrong and verdict == "wrong":
                print(f"{exchange.question!r}\n    said   {answer!r}\n    wanted {exchange.answer!r}")
    report(grades)


def report(grades: Counter[tuple[str, str]]) -> None:
    """Print a table: family, questions, exact, near, wrong; and the sum."""
    verdicts = ["exact", "near", "wrong"]
    print(f"{'family':<14}{'asked':>7}" + "".join(f"{verdict:>7}" for verdict in verdicts))
    for name in [*sorted({name for name, _ in grades}), "all"]:
        counts = [sum(n for key, n in grades.items() if key[1] == v and name in (key[0], "all")) for v in verdicts]
        print(f"{name:<14}{sum(counts):>7}" + "".join(f"{count:>7}" for count in counts))


if __name__ == "__main__":
    main()
