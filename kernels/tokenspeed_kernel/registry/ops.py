# SPDX-License-Identifier: MIT
"""Every operation of the library with the traits that may decide between its solutions.

Shapes, dtypes and meaning of the arguments are stated once, in `api`; a solution takes exactly those arguments.
"""

from tokenspeed_kernel.registry.spec import declare_op

_WEIGHT = ("weight_format", "weight_layout")
# tokens are counted in steps: see gemm.signature.counted_tokens. inputs and outputs are K and N.
_PRODUCT = (*_WEIGHT, "tokens", "outputs", "inputs")
_NORM = ("hidden", "weight_dtype")

ATTENTION_PAGED = declare_op(
    "attention.paged",
    ("head_dim", "group_size", "block_size", "windowed", "kv_dtype", "softcap", "sinks"),
    "causal attention over paged keys and values, decode and prefill rows mixed",
    tiles_rows=True,
)
ATTENTION_MLA = declare_op(
    "attention.mla",
    ("latent_dim", "key_dim", "block_size", "kv_dtype"),
    "multi-head latent attention, absorbed, over a paged latent cache, decode and prefill rows mixed",
    tiles_rows=True,
)
GEMM_LINEAR = declare_op("gemm.linear", _PRODUCT, "x @ weight.T + bias, dense or packed weight", tiles_rows=True)
GEMM_LINEAR_SILU = declare_op(
    "gemm.linear_silu_and_mul",
    _PRODUCT,
    "silu(gate) * up over halves of x @ weight.T, one launch where rows are few",
    tiles_rows=True,
)
GEMM_LINEAR_ADD = declare_op(
    "gemm.linear_add", _PRODUCT, "residual + x @ weight.T + bias, in the residual's place", tiles_rows=True
)
GEMM_LOGITS = declare_op("gemm.logits", _PRODUCT, "x @ weight.T in float32, whatever x is", tiles_rows=True)
GEMM_EMBEDDING = declare_op("gemm.embedding", _WEIGHT, "rows of a dense or packed table")
GEMM_HEADS = declare_op(
    "gemm.heads", (*_WEIGHT, "rows_per_head"), "a product of its own for every head", tiles_rows=True
)
QUANT_PREPARE = declare_op("quant.prepare", ("weight_format",), "re-pack a weight once for the device that uses it")
NORM_RMS = declare_op("norm.rms", _NORM, "root-mean-square normalisation")
NORM_ADD_RMS = declare_op("norm.add_rms", _NORM, "residual addition fused with root-mean-square normalisation")
ACTIVATION_SILU_AND_MUL = declare_op("activation.silu_and_mul", (), "silu(gate) * up over halves of the last axis")
ROPE_NEOX = declare_op("rope.neox", ("head_dim", "rot_dim"), "rotary embedding in place, half-split pairs")
ROPE_GPTJ = declare_op("rope.gptj", ("head_dim", "rot_dim"), "rotary embedding in place, neighbours as pairs")
ROPE_NORM_STORE = declare_op(
    "rope.norm_store",
    ("head_dim", "rot_dim", "normed", "block_size", "kv_dtype"),
    "norm of queries and keys, rotation, and the write of keys and values to the cache",
)
KVCACHE_STORE = declare_op("kvcache.store", ("head_dim", "block_size", "kv_dtype"), "write keys and values to slots")
KVCACHE_STORE_LATENT = declare_op("kvcache.store_latent", ("kv_dtype",), "write latents and rotated keys to slots")
KVCACHE_COPY_BLOCKS = declare_op("kvcache.copy_blocks", (), "copy whole blocks within caches")
KVCACHE_MOVE_BLOCKS = declare_op("kvcache.move_blocks", (), "copy whole blocks of all caches to or from packed ones")
SAMPLING_PENALTIES = declare_op("sampling.penalties", (), "repetition, frequency and presence penalties in place")
SAMPLING_TOKEN_MASK = declare_op("sampling.token_mask", (), "bar the tokens whose bit is not set, in place")
SAMPLING_SAMPLE = declare_op("sampling.sample", (), "temperature, top-k, top-p, min-p, seeded Gumbel-max")
SAMPLING_LOGPROBS = declare_op("sampling.logprobs", (), "log-probabilities of chosen and of most likely tokens")
MOE_PREPARE = declare_op("moe.prepare", ("weight_format",), "re-pack the experts' weights once for the device")
MOE_ROUTE = declare_op("moe.route", ("scores", "num_experts", "grouped"), "each token's experts and their weights")
MOE_EXPERTS = declare_op(
    "moe.experts",
    ("weight_formats", "weight_layouts", "activation"),
    "weighted sum of the chosen experts' gated feed-forward networks",
    tiles_rows=True,
)
STEP_UPDATE_TABLES = declare_op("step.update_tables", (), "write cells of the block tables kept on the device")
STEP_DECODE_INPUTS = declare_op("step.decode_inputs", (), "what a decode step reads, from slots and lengths alone")
STEP_KEEP_TOKENS = declare_op("step.keep_tokens", (), "leave sampled tokens for the next step, by slot")
STEP_RECEIVE = declare_op("step.receive", (), "take a decode step's rows and table updates from pinned memory")
STEP_PUBLISH = declare_op("step.publish", (), "leave sampled tokens for the next step and for the host")
