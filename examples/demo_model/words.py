"""Words to fill the templates with, and invented ones, which teach the model to say that it does not know."""

import random
import tomllib
from pathlib import Path

_LISTS = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))


def _listed(name: str) -> list[str]:
    return [word.replace("_", " ") for word in _LISTS[name].split()]


NAMES = _listed("names")
BEINGS = _listed("beings")
THEMES = _listed("themes")
TECHNICAL_THEMES = _listed("technical_themes")
UNKNOWN = _listed("unknown")

PLACES = [
    *["in a small village by the sea", "in a tall tower in the mountains", "in a quiet forest", "in a busy harbour"],
    *["in a house at the edge of the town", "in a garden behind the old mill", "in a valley full of flowers"],
    *["on an island far in the north", "in a city of bridges", "in a cabin near the lake", "in a castle on a hill"],
    *["in a workshop under the clock tower", "on a farm beside the river", "in a library with a thousand rooms"],
]

THINGS = [
    *["a golden key", "an old map", "a broken clock", "a silver bell", "a blue lantern", "a small steam engine"],
    *["a letter without a name", "a wooden box", "a strange seed", "a glass ball", "a book with empty pages"],
    *["a compass that pointed west", "a brass governor with two spinning balls", "a music box", "a red kite"],
]

_ONSETS = [*"bcdfghjklmnprstvwz", "br", "ch", "cl", "dr", "fl", "gr", "pl", "sh", "st", "th", "tr"]
_VOWELS = [*"aeiou", "ai", "ea", "oo"]
_CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "nd", "ck", "x"]


def invented(rng: random.Random) -> str:
    """A word that nobody has written before, of one to three syllables."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.randint(1, 3)))


def foreign(rng: random.Random) -> str:
    """A word that the model should know nothing about, often an invented one."""
    return invented(rng) if rng.random() < 0.4 else rng.choice(UNKNOWN + THEMES)


def with_article(noun: str) -> str:
    """``noun`` with the indefinite article that its first letter asks for."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
