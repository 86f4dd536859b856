"""One folder per op: the public op, its torch reference, its Triton kernel and its C++ kernel where there is one."""

from flyball_kernels.backend import Backend, choose_backend
from flyball_kernels.cache_blocks import CacheBlocks
from flyball_kernels.decoder_layer import DecoderHead, DecoderLayer, DecoderStack, DecodeSampling, Mixture, SharedExpert
from flyball_kernels.linear import Float8Linear, GroupedLinear, Int8Linear, PackedLinear
from flyball_kernels.paged_attention import paged_attention
from flyball_kernels.penalties import penalize
from flyball_kernels.rms_norm import add_rms_norm, rms_norm
from flyball_kernels.rope_kv_write import rope_kv_write
from flyball_kernels.sampling import sample
from flyball_kernels.step_layout import step_layout
from flyball_kernels.swiglu import swiglu
from flyball_kernels.threads import place_threads
from flyball_kernels.token_bitmask import apply_token_bitmask

__all__ = [
    "Backend",
    "CacheBlocks",
    "DecodeSampling",
    "DecoderHead",
    "DecoderLayer",
    "DecoderStack",
    "Float8Linear",
    "GroupedLinear",
    "Int8Linear",
    "Mixture",
    "PackedLinear",
    "SharedExpert",
    "add_rms_norm",
    "apply_token_bitmask",
    "choose_backend",
    "paged_attention",
    "penalize",
    "place_threads",
    "rms_norm",
    "rope_kv_write",
    "sample",
    "step_layout",
    "swiglu",
]
