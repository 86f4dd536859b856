"""Which KV block belongs to whom: block pool, block tables, prefix cache. Hands out ids; the tensors live in engine/."""
