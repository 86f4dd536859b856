"""docs/structure.md names files that exist, and a path from a request to its tokens that a reader can walk."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/structure.md").read_text()
BASES = (ROOT, *(ROOT.glob("*/flyball_*/")))
FILE = re.compile(r"`([\w./]+/\w+\.(?:py|cpp|h|yaml|md))`")

MAX_FILES_ON_PATH = 20


def test_every_file_that_it_names_exists() -> None:
    named = set(FILE.findall(TEXT))
    assert len(named) > 60, "the pattern finds them"
    lacking = {name for name in named if not any((base / name).exists() for base in BASES)}
    assert lacking <= {"cpu/variants.py", "cpu/vec.h", "cpu/kernel.cpp"}, "those are one per op"


def test_the_path_of_a_request_has_few_files() -> None:
    _, _, section = TEXT.partition("## How a request flows\n\n")
    steps, _, _ = section.partition("\n\n")
    assert steps.startswith("1. "), "the steps are the section's first paragraph"
    assert 15 <= len(set(FILE.findall(steps))) <= MAX_FILES_ON_PATH
