"""The commands of a Markdown page, to be run."""

import re
from pathlib import Path


def commands(page: Path, info: str) -> list[str]:
    """Return the lines of the fenced blocks whose info string is exactly this, such as ``bash`` or ``bash cluster``."""
    blocks = re.findall(rf"^```{re.escape(info)}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
