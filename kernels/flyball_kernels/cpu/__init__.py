"""The C++ ops for CPU: one library, compiled on this machine and registered with torch under ``torch.ops.flyball``."""
