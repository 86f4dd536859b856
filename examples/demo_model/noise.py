"""How people really type: lower case, no question mark, a filler word, a typing error."""

import random

_BEFORE = ["hi, ", "hello, ", "hey, ", "please ", "so, ", "ok, ", "um, ", "well, ", "now ", "quick question: "]
_BEFORE += ["i have a question: ", "sorry, ", "and ", "one more thing: ", "i wonder, ", "next question: "]
_AFTER = [" please", ", please", " thanks", " for me", " again", " then", " now", " exactly", " in simple words"]
_ENDS = ["?", "?", "?", "", "", ".", "!", "??", " ?", "..."]


def noisy(question: str, rng: random.Random) -> str:
    """``question`` as somebody might type it. "@" is left alone: it stands for words that must survive."""
    if rng.random() < 0.25:
        question = rng.choice(_BEFORE) + question
    if rng.random() < 0.12:
        question += rng.choice(_AFTER)
    if rng.random() < 0.15:
        question = _mistyped(question, rng)
    return _recased(question, rng) + rng.choice(_ENDS)


def _recased(text: str, rng: random.Random) -> str:
    choice = rng.random()
    if choice < 0.45:
        return text[:1].upper() + text[1:]
    if choice < 0.8:
        return text.lower()
    return text


def _mistyped(text: str, rng: random.Random) -> str:
    """``text`` with one or two letters dropped, doubled, swapped or replaced."""
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(text) - 1) if len(text) > 1 else 0
        pair = text[at : at + 2]
        if len(pair) < 2 or not pair.isalpha():
            continue
        stray = rng.choice("abcdefghijklmnopqrstuvwxyz")
        text = text[:at] + rng.choice([pair[0], pair[0] + pair, pair[::-1], stray + pair[1]]) + text[at + 2 :]
    return text
