"""Text with choices: ``{a|b}`` stands for ``a`` or ``b``; braces nest, and an option may be empty."""

import random
import re

_INNERMOST = re.compile(r"\{([^{}]*)\}")


def expand(text: str, rng: random.Random) -> str:
    """Replace every ``{a|b|...}`` by one of its options, the innermost first."""
    while "{" in text:
        text = _INNERMOST.sub(lambda match: rng.choice(match[1].split("|")), text)
    return text


def accepts(text: str, answer: str) -> bool:
    """Whether ``answer`` is one of the texts that ``expand(text, ...)`` can give."""
    pattern = re.escape(text).replace(r"\{", "(?:").replace(r"\|", "|").replace(r"\}", ")")
    return re.fullmatch(pattern, answer) is not None
