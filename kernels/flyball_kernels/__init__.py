"""One folder per op: the public op, its torch reference, its Triton kernel and its C++ kernel where there is one."""
