"""Who sent a request: clients share tokenization and the scheduler by it. It gives no rights, and nobody can read it back."""

import ipaddress
import secrets
from hashlib import blake2b

from fastapi import Request

_KEY = secrets.token_bytes(32)
"""Of this process, so that a client's name is worth nothing outside it."""

IPV6_NETWORK_BITS = 64
"""What one IPv6 client is given whole, usually: its addresses are one client."""


def client_of(request: Request) -> str:
    """Return an opaque name: of the API key (the whole Authorization header), or of the address without one.

    The address is the connection's, or what a trusted proxy says (``ApiSettings.forwarded_allow_ips``).
    """
    api_key = request.headers.get("authorization", "").strip()
    if api_key:
        return _name(b"key", api_key)
    return _name(b"address", "" if request.client is None else _network(request.client.host))


def _name(kind: bytes, value: str) -> str:
    return blake2b(value.encode(), digest_size=12, key=_KEY, person=kind).hexdigest()


def _network(host: str) -> str:
    """Return what an address counts as; a host that is no IP address counts as itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK_BITS), strict=False))
