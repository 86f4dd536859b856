"""Names of a manifest's fields, as messages give them."""

import re

from flyball_protocol.quoting import quoted

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,252}", re.ASCII)


def entry(path: str, key: str | int) -> str:
    r"""Return the path of an entry of ``path``: ``spec.replicas``, ``spec.env[2]``, ``spec['a key\n']`` (cut when long)."""
    if isinstance(key, str) and _PLAIN.fullmatch(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{quoted(key)}]"
