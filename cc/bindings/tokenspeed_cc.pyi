# SPDX-License-Identifier: MIT
"""The control plane: which rows the next forward has, and who owns which KV block.

One `Scheduler` a device rank. Use it from one thread at a time (the engine's loop). Everything inside is an
integer; request ids, weight versions, salts and adapters are numbers that the caller maps from its strings.
`plan()` returns one step, `advance()` takes its result; between the two up to `overlap_depth` further steps
may be planned. Given the same calls, two schedulers make the same plans: there is no clock inside.

Arrays of a `Plan` or an `Outcome` are read-only numpy views of memory that lives as long as any of them does.
A caller's fault raises ValueError with the field and the reason and changes nothing: a number out of range or of
another type, None, an array that is not int32 or has another shape. Arrays need not be contiguous. A call without its
arguments is Python's TypeError. RuntimeError names a broken invariant: the process should end.
"""

import numpy as np
from numpy.typing import NDArray

FINISH_NONE: int  # 0: goes on
FINISH_STOP: int  # 1: an eos or stop token
FINISH_LENGTH: int  # 2: max_new_tokens
FINISH_ABORT: int  # 3

class CacheGroup:
    """One kind of attention of a model that mixes several. All groups share the pool: num_blocks parent blocks, each
    split into blocks_per_parent blocks of a group (so equal bytes: blocks_per_parent times the group's block bytes).
    Block i of parent p is number p * blocks_per_parent + i; the first blocks_per_parent numbers are padding."""

    kind: str
    """"full": the whole history, and the only kind the first group may have. "window": the last window_tokens.
    "state": recurrent states, verify_width working ones a request, saved every checkpoint_tokens."""
    blocks_per_parent: int
    """1..64"""
    window_tokens: int
    """0 unless kind is "window"."""
    checkpoint_tokens: int
    """0 unless kind is "state"; then a multiple of block_size. Prefill chunks end there."""

    def __init__(self, *, kind: str, blocks_per_parent: int, window_tokens: int, checkpoint_tokens: int) -> None: ...

class StoreConfig:
    """The store that engines share, behind the host tier (Mooncake Store). Its operations are transfers."""

    max_prefetches: int
    """Requests for which it is asked at once."""
    max_puts: int  # in flight
    min_blocks: int
    """Fewer missing blocks of a prompt are computed without asking."""
    prefetch_timeout_us: int
    """How long a request waits for it, query and get together."""
    put_timeout_us: int
    backoff_us: int
    """How long it is left alone after a failure or a timeout; doubles with each further one, up to max_backoff_us. Then
    one operation finds out. Reading and writing are judged apart."""
    max_backoff_us: int

    def __init__(
        self,
        *,
        max_prefetches: int,
        max_puts: int,
        min_blocks: int,
        prefetch_timeout_us: int,
        put_timeout_us: int,
        backoff_us: int,
        max_backoff_us: int,
    ) -> None: ...

class SchedulerConfig:
    """What the scheduler is told once; `Scheduler(config)` raises ValueError by field name."""

    num_blocks: int
    """Blocks of the device pool including block 0, which is never handed out: padding rows write there."""
    block_size: int
    """Tokens a block."""
    max_num_seqs: int
    """Requests that may hold blocks and run at once."""
    max_model_len: int
    """Limit of prompt + output in tokens."""
    max_batched_tokens: int
    """Token budget of a step, decode rows and prefill chunks together; at least max_num_seqs * verify_width."""
    chunked_prefill: bool
    """False: a prompt is one row, at most max_batched_tokens long. A request that was retracted may still resume in chunks."""
    overlap_depth: int
    """Steps that may be in flight while the next one is planned: 0, 1, n. Unsettled steps are at most one more."""
    verify_width: int
    """Tokens a decode row may carry (the last token and drafts); 1 is plain decoding."""
    verify_overlap: bool
    """Whether a row may follow rows whose drafts are not judged yet, up to overlap_depth. Its position is then known on
    the device only (see Plan.context_slack). False: a request has one row in flight while verify_width is above 1."""
    max_decode_gap_tokens: int
    """Most prefill tokens in a step that also decodes: bounds the gap between two tokens of a running request.
    Without chunked prefill a prompt that does not fit beside the decodes gets one step of its own."""
    context_cost_tokens: int
    """How far a prompt's token attends for as much as the rest of it costs: in that gap a token with s tokens before it
    counts as 1 + s / context_cost_tokens, so that chunks of a long context get shorter. 0: every token counts once."""
    enable_prefix_caching: bool
    eos_token_ids: list[int]
    role: str
    """"fused"; "prefill": a request ends when its KV was sent; "decode": its KV is received before it decodes."""
    num_host_blocks: int
    """Parent blocks of the host tier, numbered from 1 and split by groups as on the device; 0: there is none. Needs
    enable_prefix_caching."""
    groups: list[CacheGroup]
    """The cache groups; the first one keeps the full history. All tiers, roles and widths work with several."""
    num_layers: int
    """Layers in which loads from the host tier proceed; 1: as a whole."""
    load_lead_layers: int
    """0..num_layers: so many layers must be loaded before a step may run behind the load (Plan.load_waits). num_layers:
    the request waits for the end of its load."""
    store: StoreConfig | None
    """None: there is none. Needs num_host_blocks."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_batched_tokens: int,
        chunked_prefill: bool,
        overlap_depth: int,
        verify_width: int,
        max_decode_gap_tokens: int,
        enable_prefix_caching: bool,
        eos_token_ids: list[int],
        role: str = "fused",
        num_host_blocks: int = 0,
        groups: list[CacheGroup] = ...,
        verify_overlap: bool = False,
        num_layers: int = 1,
        load_lead_layers: int = 1,
        store: StoreConfig | None = None,
        context_cost_tokens: int = 0,
    ) -> None: ...

class RequestSpec:
    """A request. `token_ids` is copied. Lower `priority` runs first; each class stands as if it had come 512 steps
    after the class before it, so that nobody starves. Blocks are shared only between requests with equal
    `cache_salt` and `adapter` (and weight version)."""

    def __init__(
        self,
        *,
        request_id: int,
        token_ids: NDArray[np.int32],
        max_new_tokens: int,
        min_new_tokens: int,
        stop_token_ids: list[int],
        ignore_eos: bool,
        priority: int,
        cache_salt: int,
        adapter: int,
    ) -> None: ...

class Plan:
    """One step. R rows: decodes first, then prefill chunks. Read it until the step settles."""

    @property
    def step_id(self) -> int: ...
    @property
    def num_rows(self) -> int:
        """R, at least 1."""
    @property
    def num_decode_rows(self) -> int: ...
    @property
    def request_ids(self) -> NDArray[np.int64]:
        """[R]"""
    @property
    def slots(self) -> NDArray[np.int32]:
        """[R] row of `Scheduler.block_tables()` and of the engine's per-request device state."""
    @property
    def query_lens(self) -> NDArray[np.int32]:
        """[R] tokens this step computes."""
    @property
    def context_lens(self) -> NDArray[np.int32]:
        """[R] tokens in the KV cache before this step's query; the query's first position. With context_slack: at most."""
    @property
    def context_slack(self) -> NDArray[np.int32]:
        """[R] drafts of the same request in flight. The row starts behind the last token that the row before kept,
        which the device knows: at context_lens - context_slack to context_lens. All 0 without verify_overlap. Blocks
        for context_lens + query_lens tokens are there."""
    @property
    def samples(self) -> NDArray[np.bool_]:
        """[R] whether the row yields tokens: every decode row, and the last chunk of a prompt."""
    @property
    def prompt_token_ids(self) -> NDArray[np.int32]:
        """[sum of query_lens of the prefill rows] in row order. Decode rows read their token on the device."""
    @property
    def new_slots(self) -> NDArray[np.int32]:
        """[N] slots whose request has its first row here: set up sampling state before it runs. A request that was
        retracted comes back here; its prefill row then covers prompt and output so far."""
    @property
    def new_slot_request_ids(self) -> NDArray[np.int64]:
        """[N]"""
    @property
    def block_copies(self) -> NDArray[np.int32]:
        """[C, 2] (source, destination) block copies, all layers, to run before this step writes."""
    @property
    def table_updates(self) -> NDArray[np.int32]:
        """[U, 3] (slot, column, block): every change of the block tables since the plan before, in order."""

    @property
    def load_waits(self) -> NDArray[np.int64]:
        """[W, 2] (transfer_id, layers_done) of loads that this step runs behind: before it computes layer l >= layers_done,
        layer l of the transfer must be there. The step settles after the transfer. If the transfer fails, the rows of its
        request are void: run them on whatever is there; their tokens are ignored, and the request starts again."""
    @property
    def groups(self) -> list[GroupPlan]:
        """From group 1 on."""

class GroupPlan:
    """What a step means to one cache group beyond the first; as for group 0, and what only states need.

    A request has verify_width working states, in the columns of its table row. A row takes the state before its query
    from its column of state_columns, reads all of it before it writes any, and leaves behind query token i of a decode
    row the state in column i; a prefill row leaves its last state in column 0."""

    @property
    def table_updates(self) -> NDArray[np.int32]:
        """[U, 3] (slot, column, block)"""
    @property
    def copies(self) -> NDArray[np.int32]:
        """[C, 2] (source, destination) to run before the step: a saved state becomes a working state. A request whose
        first row has context_len 0 starts from a zero state instead. Of a window: the part of a block that is shared."""
    @property
    def saves(self) -> NDArray[np.int32]:
        """[S, 2] (source, destination) to run behind the step and before the next: a working state as it is then is
        kept. One behind a draft that turns out wrong is forgotten when the step settles."""
    @property
    def state_columns(self) -> NDArray[np.int32]:
        """[R] of a state group, [0] otherwise: the column with the state before the row's query; -1: the column of the
        last token that the request's row before kept, which the device knows (only with verify_overlap)."""

class Outcome:
    """What a settled step meant. One entry a request that produced tokens or ended, in row order."""

    @property
    def request_ids(self) -> NDArray[np.int64]:
        """[N]"""
    @property
    def rows(self) -> NDArray[np.int32]:
        """[N] row of the plan; -1 for an end that belongs to no row."""
    @property
    def num_tokens(self) -> NDArray[np.int32]:
        """[N] how many of the row's tokens to emit, the stop token included; what was sampled behind it is dropped."""
    @property
    def finish(self) -> NDArray[np.uint8]:
        """[N] FINISH_*"""
    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """[N]"""
    @property
    def completion_tokens(self) -> NDArray[np.int32]:
        """[N] emitted so far, this step included."""
    @property
    def cached_tokens(self) -> NDArray[np.int32]:
        """[N] prompt tokens that came from the prefix cache when the request was first admitted."""
    @property
    def matched_tokens(self) -> NDArray[np.int32]:
        """[N] the stop or eos token that ended it, -1 otherwise."""

class Ended:
    """The terminal event of a request that was aborted."""

    @property
    def request_id(self) -> int: ...
    @property
    def finish(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...

class Load:
    """active + cached + free == total blocks; block 0 is not counted."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def active_blocks(self) -> int:
        """Held by a request, or cached and in use."""
    @property
    def cached_blocks(self) -> int:
        """Kept for prefix hits only; taken when the free ones run out."""
    @property
    def free_blocks(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def host_cached_blocks(self) -> int:
        """Blocks of all groups that the host tier keeps for hits; 0 without one."""
    @property
    def host_reserved_blocks(self) -> int:
        """Likewise, of those that a copy is being made into."""
    @property
    def host_free_blocks(self) -> int:
        """Parent blocks of the host tier with nothing in them."""

class RequestCounters:
    """Steps stand for times (the engine knows when it launched which); -1: not yet."""

    @property
    def submitted_step(self) -> int:
        """The step that was to be planned next when the request arrived."""
    @property
    def admitted_step(self) -> int: ...
    @property
    def prefill_done_step(self) -> int:
        """The step with the last chunk of the prompt."""
    @property
    def first_token_step(self) -> int:
        """The step that sampled the first token."""
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """Tokens that were not computed when it was first admitted, wherever they came from."""
    @property
    def host_tokens(self) -> int:
        """Of these, loaded from the host tier."""
    @property
    def store_tokens(self) -> int:
        """Of these, brought by the store for this request. The others were on the device."""
    @property
    def completion_tokens(self) -> int: ...
    @property
    def num_retractions(self) -> int:
        """How often it lost its blocks to others; it resumes exactly."""
    @property
    def num_retracted_steps(self) -> int:
        """Steps planned while it waited to come back."""
    @property
    def num_delayed(self) -> int:
        """How often it began to wait though it could have decoded: others prefilled, or blocks were short."""
    @property
    def num_delayed_steps(self) -> int: ...
    @property
    def num_sampling_rows(self) -> int:
        """Rows that sampled for it; completion_tokens divided by it is the accepted length."""

TRANSFER_STORE: int  # 0: device_blocks to host_blocks
TRANSFER_LOAD: int  # 1: host_blocks to device_blocks; the request waits for it
TRANSFER_SEND: int  # 2: tokens [0, num_tokens) of the slot go to the decode engine
TRANSFER_RECEIVE: int  # 3: tokens [first_token, num_tokens) come into the slot's blocks from the prefill engine

TRANSFER_QUERY: int  # 4: which of the blocks does the store have? Nothing is copied
TRANSFER_GET: int  # 5: blocks of the store to host_blocks
TRANSFER_PUT: int  # 6: host_blocks to the store
TRANSFER_CANCEL: int  # 7: the transfer `target` is late or not wanted any more; settle that one soon, not this one

class Transfer:
    """A copy of KV to carry out beside the steps. Everything it touches is held until settle_transfer()."""

    @property
    def transfer_id(self) -> int: ...
    @property
    def kind(self) -> int:
        """TRANSFER_*"""
    @property
    def request_id(self) -> int:
        """-1 for a store."""
    @property
    def slot(self) -> int:
        """Row of the block tables; -1 where it has none."""
    @property
    def first_token(self) -> int:
        """The transfer covers tokens [first_token, num_tokens) of group 0; what other groups need to go on at
        num_tokens is in the arrays."""
    @property
    def num_tokens(self) -> int: ...
    @property
    def groups(self) -> NDArray[np.int32]:
        """[n] the cache group of each block. Whole blocks are copied."""
    @property
    def columns(self) -> NDArray[np.int32]:
        """[n] its place in the sequence, in blocks; 0 for a state (of a query or get: that of the block it is behind).
        [0] for a store or a put."""
    @property
    def device_blocks(self) -> NDArray[np.int32]:
        """[n] block numbers of the group. [0] for a query, get or put."""
    @property
    def host_blocks(self) -> NDArray[np.int32]:
        """[n] of a store, load, get or put: block i of host parent p is number p * blocks_per_parent + i. [0] otherwise."""
    @property
    def hashes(self) -> NDArray[np.uint64]:
        """[n] of a query, get or put, [0] otherwise: the chained hash of each block, its name in the store together with
        its group. It covers all tokens before, weight version, salt and adapter, as the caller numbered them."""
    @property
    def parent_hashes(self) -> NDArray[np.uint64]:
        """[n] likewise, of the block before."""
    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[n * block_size] likewise. The hash finds, parent and tokens prove: put them beside the KV, and tell a get whose
        proof differs as not arrived."""
    @property
    def target(self) -> int:
        """The transfer that a cancel is about; -1 otherwise."""
    @property
    def deadline_us(self) -> int:
        """Of a query, get or put, by the clock of advance_clock(); -1 otherwise."""

class StoreCounters:
    """What the store was good for, since the scheduler was made."""

    @property
    def num_queries(self) -> int: ...
    @property
    def num_gets(self) -> int: ...
    @property
    def num_partial_gets(self) -> int: ...
    @property
    def hit_tokens(self) -> int:
        """Whose blocks arrived whole, in group 0."""
    @property
    def num_puts(self) -> int:
        """Blocks that it took."""
    @property
    def num_timeouts(self) -> int: ...
    @property
    def num_failures(self) -> int: ...
    @property
    def num_skipped(self) -> int:
        """Requests that did not ask, because it was left alone or because there was no room for what it has."""

class BlockStored:
    """A full block became reusable. On the device its parent was stored before it."""

    @property
    def medium(self) -> str:
        """The tier: "device" or "host"."""
    @property
    def block_hash(self) -> int: ...
    @property
    def parent_hash(self) -> int | None: ...
    @property
    def token_ids(self) -> list[int]: ...

class BlockRemoved:
    """A block was evicted. On the device its children went before it."""

    @property
    def medium(self) -> str:
        """The tier: "device" or "host"."""
    @property
    def block_hash(self) -> int: ...

class AllBlocksCleared:
    """Nothing is cached any more, on any medium."""

class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        """Raises ValueError naming the field that cannot be."""
    def submit(self, spec: RequestSpec) -> None:
        """Queues a request. Raises ValueError: id in use, empty prompt, negative token, a budget out of range, or
        the limit (max_model_len, max_batched_tokens, num_blocks) that it could never fit under."""
    def abort(self, request_id: int) -> Ended | None:
        """Ends a request at once; no Outcome will mention it again. None: unknown, or ended already. Blocks that
        steps in flight use come back when those settle."""
    def plan(self) -> Plan | None:
        """The next step. None: nothing can be launched before a step settles or a request arrives."""
    def advance(self, step_id: int, token_ids: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> Outcome:
        """Settles the oldest step in flight. token_ids [R, W] with any W >= 1, num_tokens [R]: how many of a row's
        tokens were accepted, 1..query_len for a decode row, 1 for a last chunk; rows that do not sample and rows
        of requests that ended meanwhile are ignored. Raises ValueError: not the oldest step, shapes, counts."""
    def transfers(self) -> list[Transfer]:
        """Copies to carry out, each told once. Take them after every plan() (None too), advance() and
        settle_transfer() and advance_clock(). Empty unless role, num_host_blocks or store ask for them. Those that a
        plan's load_waits name must be under way before its step runs."""
    def transfer_progress(self, transfer_id: int, layers_done: int) -> None:
        """Layers [0, layers_done) of a load are on the device: with load_lead_layers of them its request may run. Raises
        ValueError: no load in flight, less than told before, more than num_layers."""
    def advance_clock(self, now_us: int) -> None:
        """The time, from any epoch: the scheduler reads no clock. Queries, gets and puts that are due are cancelled (a
        TRANSFER_CANCEL each), and requests that waited go on without. Only needed with a store. Raises ValueError: it
        went back."""
    def store_counters(self) -> StoreCounters: ...
    def settle_transfer(
        self, transfer_id: int, ok: bool, first_token: int, done: NDArray[np.bool_] | None = None
    ) -> Outcome:
        """How a transfer went, in any order; a late one is settled as failed, once nothing writes any more.
        first_token is the prefill engine's sampled token for a receive that went well, -1 otherwise. Failed: a store
        or put is forgotten, a load, query or get is done without, a send or receive ends its request with FINISH_ABORT.
        done [n], of a query or get that went well: the block is there; it arrived, whole and proven. None otherwise.
        Raises ValueError: not in flight, no first_token, done of another length."""
    def pause(self, mode: str) -> list[Ended]:
        """ "abort": every request ends now, their ends are returned. "wait": who runs goes on, nobody is admitted.
        "keep": nothing is planned. Submitting goes on. Raises ValueError: unknown mode."""
    def resume(self) -> None: ...
    def block_tables(self, group: int = 0) -> NDArray[np.int32]:
        """[num_slots, ceil(max_model_len / block_size)] (a state group: [num_slots, verify_width]), a live read-only view. While a request lives in a row its
        cells are only appended; the row is not used again while a step in flight reads it."""
    def has_work(self) -> bool:
        """Whether a request is live or a step is in flight."""
    def load(self) -> Load: ...
    def check(self) -> None:
        """Raises RuntimeError with the broken invariant: free + held + cached == total, one owner a block, what is
        published has settled, and so on. O(blocks)."""
    def flush_cache(self) -> bool:
        """Forgets every cached prefix. False, and nothing happens, while a request holds blocks. False too while a
        transfer is in flight; what waits to be stored or put is forgotten then, so asking again soon is enough."""
    def set_weight_version(self, version: int) -> None:
        """Blocks computed from now on are shared under `version` only. Requests that run through the change keep
        their blocks and share none of them; the host tier forgets what no copy reads. Raises ValueError: negative."""
    def enable_kv_events(self) -> None:
        """Starts recording; without it kv_events() stays empty."""
    def kv_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """What changed in the prefix cache since the last call, in order."""
    def stats(self, request_id: int) -> RequestCounters:
        """Of a live request, or of one of the last that ended. Raises ValueError: unknown."""
