"""What tests/adversary shares: real processes, raw sockets, and a witness, another client whose stream runs meanwhile."""
