"""The certificates of a control plane: one authority, a server, an administrator, the aggregator, service accounts."""

from dataclasses import dataclass
from pathlib import Path

import trustme

SERVICE_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")


@dataclass(frozen=True)
class KeyPair:
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Pki:
    """Files in a folder; ``service_accounts`` is used for its key alone."""

    ca: Path
    server: KeyPair
    admin: KeyPair
    front_proxy: KeyPair
    service_accounts: KeyPair
    authority: trustme.CA

    @classmethod
    def create(cls, folder: Path, *addresses: str) -> "Pki":
        authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        ca = folder / "ca.crt"
        authority.cert_pem.write_to_path(ca)

        def issue(name: str, *identities: str, organization: str | None = None) -> KeyPair:
            # The name again among the identities: without any, Go refuses the certificate.
            leaf = authority.issue_cert(name, *identities, common_name=name, organization_name=organization)
            pair = KeyPair(folder / f"{name}.crt", folder / f"{name}.key")
            leaf.cert_chain_pems[0].write_to_path(pair.certificate)
            leaf.private_key_pem.write_to_path(pair.key)
            return pair

        return cls(
            ca=ca,
            server=issue("apiserver", *SERVICE_NAMES, *addresses),
            admin=issue("admin", organization="system:masters"),
            front_proxy=issue("front-proxy"),
            service_accounts=issue("service-accounts"),
            authority=authority,
        )
