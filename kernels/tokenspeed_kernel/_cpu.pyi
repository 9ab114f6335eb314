# SPDX-License-Identifier: MIT
"""C++ CPU kernels (csrc/cpu). Addresses are `Tensor.data_ptr()`; 0 stands for an absent tensor.

Strides count elements. Callers have checked shapes, dtypes and contiguity; ids, positions, slots and block numbers
are checked here, and ValueError names the first bad one. Every function releases the GIL. `format` is a number of
`quant.cpu_prepare.FORMAT_CODES`.
"""

class CacheShape:
    """Sizes of a layer's two caches and the distances between their blocks, in elements of `format`: a number of
    `kvcache.cpu_cache.KV_CODES`."""

    num_kv_heads: int
    head_dim: int

    def __init__(
        self,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        k_block_stride: int,
        v_block_stride: int,
        format: int,
    ) -> None: ...

class RouteRule:
    """How experts are chosen; see `moe.routing.Routing`."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        num_groups: int,
        top_groups: int,
        sigmoid: bool,
        best_two: bool,
        renormalize: bool,
        scale: float,
    ) -> None: ...

class ExpertMatrix:
    """One packed matrix of every expert; experts lie `expert_bytes` apart."""

    def __init__(self, data: int, format: int, expert_bytes: int, num_rows: int, num_columns: int) -> None: ...

class ExpertLayer:
    """A layer's experts; the weights must outlive it."""

    def __init__(
        self,
        num_experts: int,
        gate_up: list[ExpertMatrix],
        down: ExpertMatrix,
        gate_up_bias: int,
        down_bias: int,
        clamped: bool,
        alpha: float,
        limit: float,
    ) -> None: ...

class Recording:
    """Calls of this module that are made again, with the same arguments, by `play`."""

    def __init__(self) -> None: ...
    def start(self) -> None:
        """Add what this thread calls from now on. RuntimeError while another recording is in progress here."""

    @staticmethod
    def stop() -> None: ...
    def play(self) -> None:
        """ValueError as the calls raise it; those after it are not made."""

    def __len__(self) -> int: ...

def isa() -> str:
    """The instruction set in use: "avx512", "avx2" or "baseline"; TOKENSPEED_CPU_ISA chooses at start."""

def use_isa(name: str) -> None:
    """Switch later calls to another set; ValueError when the CPU lacks it. For tests and benchmarks."""

def num_threads() -> int:
    """Threads that share a kernel's work, the caller's included."""

def set_num_threads(num_threads: int) -> None:
    """ValueError outside [1, 512]. Waits for a kernel in progress."""

def shutdown() -> None:
    """Join the workers; the next kernel starts them again. Runs at exit by itself."""

def packed_bytes(format: int, n: int, k: int, /) -> int: ...
def advise_huge_pages(address: int, num_bytes: int, /) -> None:
    """Ask for huge pages behind the whole pages of a buffer; no effect where the system has none."""

def pack(format: int, source: int, n: int, k: int, packed: int, /) -> None: ...
def linear(
    x: int, x_stride: int, weight: int, format: int, num_tokens: int, n: int, k: int, bias: int, out: int, /
) -> None: ...
def embedding(
    token_ids: int, wide_ids: bool, weight: int, format: int, num_tokens: int, n: int, k: int, out: int, /
) -> None: ...
def rms_norm(
    x: int,
    x_stride: int,
    residual: int,
    residual_stride: int,
    weight: int,
    eps: float,
    num_tokens: int,
    hidden: int,
    out: int,
    /,
) -> None: ...
def silu_and_mul(x: int, x_stride: int, num_tokens: int, width: int, out: int, /) -> None: ...
def rope(
    q: int,
    q_stride: int,
    q_head_stride: int,
    num_heads: int,
    k: int,
    k_stride: int,
    k_head_stride: int,
    num_kv_heads: int,
    positions: int,
    num_tokens: int,
    cos_sin: int,
    max_positions: int,
    rot_dim: int,
    interleaved: bool,
    /,
) -> None: ...
def store_kv(
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    num_tokens: int,
    k_cache: int,
    v_cache: int,
    scales: tuple[int, int],
    shape: CacheShape,
    slot_mapping: int,
    /,
) -> None: ...
def attention(
    q: int,
    q_stride: int,
    num_tokens: int,
    num_heads: int,
    k_cache: int,
    v_cache: int,
    scales: tuple[int, int],
    shape: CacheShape,
    block_tables: int,
    table_stride: int,
    table_columns: int,
    query_start: int,
    kv_lens: int,
    num_rows: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: int,
    out: int,
    /,
) -> None: ...
def route(
    logits: int, logits_stride: int, bias: int, num_tokens: int, rule: RouteRule, weights: int, experts: int, /
) -> None: ...
def experts(
    layer: ExpertLayer,
    x: int,
    x_stride: int,
    weights: int,
    chosen: int,
    num_tokens: int,
    top_k: int,
    gate_up_rows: int,
    hidden_rows: int,
    out: int,
    /,
) -> None:
    """gate_up_rows and hidden_rows: room for num_tokens * top_k rows of gate and up, and of the widest of x and out."""

def latent_attention(
    q: int,
    q_stride: int,
    num_tokens: int,
    num_heads: int,
    cache: int,
    shape: CacheShape,
    block_tables: int,
    table_stride: int,
    table_columns: int,
    query_start: int,
    kv_lens: int,
    num_rows: int,
    scale: float,
    latent_dim: int,
    out: int,
    /,
) -> None: ...
def store_latent(
    latent: int,
    latent_stride: int,
    latent_dim: int,
    key: int,
    key_stride: int,
    num_tokens: int,
    cache: int,
    shape: CacheShape,
    slot_mapping: int,
    /,
) -> None: ...
def heads_linear(
    x: int,
    x_stride: int,
    x_head_stride: int,
    weight: int,
    format: int,
    num_tokens: int,
    num_heads: int,
    n: int,
    k: int,
    out: int,
    out_stride: int,
    out_head_stride: int,
    /,
) -> None: ...
def copy_blocks(cache: int, num_blocks: int, block_bytes: int, pairs: int, num_pairs: int, /) -> None: ...
def move_blocks(caches: int, num_caches: int, packed: int, pairs: int, num_pairs: int, to_packed: bool, /) -> None: ...
def penalties(
    logits: int,
    num_rows: int,
    vocab: int,
    slots: int,
    num_slots: int,
    output_counts: int,
    prompt_mask: int,
    repetition: int,
    frequency: int,
    presence: int,
    /,
) -> None: ...
def token_mask(logits: int, num_rows: int, vocab: int, mask: int, rows: int, count: int, /) -> None: ...
def sample(
    logits: int,
    num_rows: int,
    vocab: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    seeds: int,
    positions: int,
    tokens: int,
    /,
) -> None: ...
def logprobs(
    logits: int,
    num_rows: int,
    vocab: int,
    token_ids: int,
    wide_ids: bool,
    top_n: int,
    chosen: int,
    top_values: int,
    top_ids: int,
    /,
) -> None: ...
def clear(address: int, num_bytes: int, /) -> None: ...
def copy_rows(
    source: int, source_stride: int, target: int, target_stride: int, num_rows: int, row_bytes: int, /
) -> None:
    """Strides count bytes; what is copied must not overlap where it goes."""

def add(x: int, y: int, out: int, count: int, /) -> None:
    """Of contiguous float32 tensors."""
