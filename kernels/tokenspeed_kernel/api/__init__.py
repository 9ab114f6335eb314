# SPDX-License-Identifier: MIT
"""What models and samplers call: one function an operation, dispatched to the solution that fits the tensors.

Tensors are row-major and contiguous unless a docstring says otherwise, and all of one call's live on one device.
Shapes use T tokens of a step, R rows (requests) of a step, S sampled rows, V vocabulary, H hidden size, Hq and Hk
query and KV heads, D head size. Functions start work and never wait for the device. A call that no solution fits
raises `KernelError`; solutions raise ValueError for shapes or dtypes that disagree.
"""

from tokenspeed_kernel.api.layers import (
    add_rms_norm,
    adds_within,
    embedding,
    linear,
    linear_add,
    linear_heads,
    linear_silu_and_mul,
    logits,
    prepare_weight,
    rms_norm,
    rope,
    rounds_inputs,
    silu_and_mul,
)
from tokenspeed_kernel.api.moe import prepare_experts, route, run_experts
from tokenspeed_kernel.api.paged import (
    attention,
    copy_blocks,
    latent_attention,
    move_blocks,
    norm_rope_store,
    store_kv,
    store_latent,
)
from tokenspeed_kernel.api.sampling import apply_penalties, logprobs, sample, token_mask
from tokenspeed_kernel.api.step import decode_inputs, keep_tokens, publish, receive, update_tables
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.cuda_memory import ReservedMemory, view_of_address
from tokenspeed_kernel.moe.routing import Routing
from tokenspeed_kernel.moe.weights import ExpertMatrix, Experts, GatedActivation
from tokenspeed_kernel.quant.packed import BLOCK_FORMATS, InputRounding, PackedWeight, Weight
from tokenspeed_kernel.quant.reference import dequantize
from tokenspeed_kernel.quant.scaled import block_size, in_blocks_of_32, quantize_rows, scaled_weight
from tokenspeed_kernel.recording import Recorded, Workspace, record
from tokenspeed_kernel.registry import KernelError, explain, override, parse_overrides, set_overrides
from tokenspeed_kernel.rope.heads import HeadNorms, Heads, Slots

__all__ = [
    "BLOCK_FORMATS",
    "AttentionMetadata",
    "ExpertMatrix",
    "Experts",
    "GatedActivation",
    "HeadNorms",
    "Heads",
    "InputRounding",
    "KernelError",
    "PackedWeight",
    "ReservedMemory",
    "Recorded",
    "Routing",
    "Slots",
    "Weight",
    "Workspace",
    "add_rms_norm",
    "adds_within",
    "apply_penalties",
    "attention",
    "block_size",
    "copy_blocks",
    "move_blocks",
    "decode_inputs",
    "dequantize",
    "embedding",
    "explain",
    "in_blocks_of_32",
    "keep_tokens",
    "latent_attention",
    "linear",
    "linear_add",
    "linear_heads",
    "linear_silu_and_mul",
    "logits",
    "logprobs",
    "norm_rope_store",
    "override",
    "parse_overrides",
    "prepare_experts",
    "prepare_weight",
    "publish",
    "quantize_rows",
    "receive",
    "record",
    "rms_norm",
    "rope",
    "route",
    "run_experts",
    "rounds_inputs",
    "sample",
    "scaled_weight",
    "set_overrides",
    "silu_and_mul",
    "store_kv",
    "store_latent",
    "token_mask",
    "update_tables",
    "view_of_address",
]
