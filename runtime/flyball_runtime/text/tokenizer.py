"""Loading a model's tokenizer."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast


def load_tokenizer(path: Path) -> Any:
    """Return the checkpoint's tokenizer with its chat template.

    A ``tokenizer.json`` is complete by itself, so it is read without AutoTokenizer, which loads torch: hundreds of MiB
    that the API process has no use for. Older formats need AutoTokenizer to convert them.
    """
    if (path / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer  # loads torch

    return AutoTokenizer.from_pretrained(path)
