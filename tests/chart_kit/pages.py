"""The commands of a Markdown page, to be run."""

import re
from pathlib import Path


def commands(page: Path, *infos: str) -> list[str]:
    """Return the lines of the fenced blocks with one of these info strings, such as ``bash`` or ``bash cluster``, in order."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    text = "".join(block for info, block in blocks if info in infos)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
