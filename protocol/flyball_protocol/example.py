"""A first request to a server that has just started, as a line for the shell."""

import json
import shlex
from typing import Any

QUESTION = "Say hello."
MAX_TOKENS = 32
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def base_url(host: str, port: int) -> str:
    """Return a URL that reaches a server on this machine that listens on ``host``, which may mean every address."""
    reachable = _HERE.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def curl_line(url: str, model: str, *, chat: bool) -> str:
    """Return a ``curl`` command that asks for an answer of a few tokens.

    Args:
        chat: whether the model has a chat template; without one, the completions API is asked.
    """
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": QUESTION}
    body: dict[str, Any] = {"model": model, **asked, "max_tokens": MAX_TOKENS}
    return f"curl {url}{path} -d {shlex.quote(json.dumps(body))}"
