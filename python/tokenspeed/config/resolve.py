# SPDX-License-Identifier: MIT
"""From flags, hardware and model to one frozen slice a component: `resolve`, a pure function.

Whoever builds a component passes its slice and nothing else. Nothing changes a slice later; what can only be known
by measuring (how many KV blocks fit) is computed by the engine from `MemoryConfig`. Raises `FlagError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tokenspeed.config.curve import EngineCurve, engine_curve
from tokenspeed.config.flags import FlagError, json_object
from tokenspeed.config.graphs import RECORDED_ROWS, GraphConfig, capture_sizes
from tokenspeed.config.hardware import Hardware
from tokenspeed.config.operations import OperationsConfig, operations_of
from tokenspeed.config.parallel import ParallelConfig, gateway_host, parallel_of, replica_values
from tokenspeed.config.port_clusters import check_clusters
from tokenspeed.config.quantization import GGUF_TYPES, QuantGroup, Quantization
from tokenspeed.config.sampling import preferred_params
from tokenspeed.config.tier import TierConfig, tier_of

Dtype = Literal["float32", "float16", "bfloat16"]

_DTYPE_NAMES: dict[str, Dtype] = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
# Past these a CPU's share of the pool is address space that nobody uses.
_CPU_MEMORY_SHARE, _GPU_MEMORY_SHARE = 0.2, 0.9


class ModelFacts(Protocol):
    """What `resolve` reads of a model; `config.model.ModelConfig` has it."""

    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def longest_context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def quantization(self) -> Quantization | None: ...
    def check_ranks(self, num_ranks: int) -> None: ...


@dataclass(frozen=True)
class DeviceConfig:
    """`device` is what torch calls it: "cpu", "cuda:0". deterministic: only kernels whose rows do not depend on each
    other."""

    device: str
    dtype: Dtype
    num_threads: int
    kernel_overrides: tuple[str, ...]
    deterministic: bool


@dataclass(frozen=True)
class LoaderConfig:
    """quantization: of the weights, as the checkpoint and `--quantization` say together. extra: for load formats that
    the user brings. num_read_ahead: threads that read files ahead of the loader."""

    load_format: str
    tokenizer: str | None
    """Where the tokenizer is, when it is not the model's."""
    quantization: Quantization | None
    extra: Mapping[str, Any]
    num_read_ahead: int


@dataclass(frozen=True)
class KVCacheConfig:
    """dtype: "float8_e4m3fn", or one of `Dtype`. param_path: a file of scales for fp8, in place of the checkpoint's."""

    dtype: str
    per_token_head: bool
    param_path: str | None


@dataclass(frozen=True)
class MemoryConfig:
    """How the KV pool is sized: `num_tokens`, else `num_bytes`, else `share` of the device's memory."""

    block_size: int
    share: float
    num_tokens: int | None
    num_bytes: int | None


@dataclass(frozen=True)
class SchedulerLimits:
    """Everything of the scheduler but the size of its pool; units are tokens unless the name says otherwise."""

    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_batched_tokens: int
    chunked_prefill: bool
    overlap_depth: int
    max_decode_gap_tokens: int
    enable_prefix_caching: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SamplingConfig:
    """detects_nan: whether logits are looked at for NaN, which ends a request. scored_at_once: rows of logits of a
    prompt that exist at the same time while its own tokens are scored."""

    detects_nan: bool
    scored_at_once: int


@dataclass(frozen=True)
class AdmissionConfig:
    """What a request is checked against. `seed` is the base of seeds that nobody gave; None: a random one."""

    vocab_size: int
    max_model_len: int
    stream_interval: int
    seed: int | None
    allow_custom_processors: bool
    """Whether requests may bring code that changes logits."""
    grammar_backend: str
    always_greedy: bool
    num_ranks: int


@dataclass(frozen=True)
class GrammarConfig:
    """How constraints are compiled. `backend`: "xgrammar", "llguidance" or "none". A compilation that takes longer than
    `timeout_s` is given up, tried again up to `max_retries` times, and its thread counts as lost while it goes on."""

    backend: str
    timeout_s: float
    max_retries: int
    any_whitespace: bool
    num_threads: int
    cache_bytes: int
    max_lost: int


@dataclass(frozen=True)
class LogConfig:
    log_level: str
    log_requests: bool
    log_requests_level: int
    log_request_stats: bool
    decode_log_interval: int
    data_rank: int


@dataclass(frozen=True)
class LaneConfig:
    """Where a headless engine dials."""

    host: str
    port: int
    engine_index: int
    curve: EngineCurve | None


@dataclass(frozen=True)
class OfflineConfig:
    """preferred_params: sampling parameters of requests that do not say them."""

    skip_tokenizer_init: bool
    stream_output: bool
    preferred_params: Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    device: DeviceConfig
    parallel: ParallelConfig
    loader: LoaderConfig
    kv_cache: KVCacheConfig
    memory: MemoryConfig
    tier: TierConfig | None
    scheduler: SchedulerLimits
    graphs: GraphConfig
    sampling: SamplingConfig
    admission: AdmissionConfig
    grammar: GrammarConfig
    log: LogConfig
    operations: OperationsConfig
    lane: LaneConfig
    offline: OfflineConfig


def resolve(raw: Mapping[str, Any], hardware: Hardware, model: ModelFacts) -> Config:
    """`raw` is `ParsedFlags.values`. Pure: the same arguments give an equal Config."""
    check_clusters(raw)
    raw = replica_values(raw)
    device = _device(raw, hardware)
    on_cpu = device == "cpu"
    dtype = _dtype(raw, model, on_cpu)
    max_model_len = _max_model_len(raw, model)
    scheduler = _scheduler(raw, model, on_cpu, max_model_len)
    parallel = parallel_of(raw, device, len(hardware.gpus))
    model.check_ranks(parallel.tensor_size)
    if raw["deterministic"] and not on_cpu and parallel.tensor_size > 2:
        # Of two numbers there is one sum; of more, NCCL's depends on where in the message they lie.
        raise FlagError("--deterministic", "more than two GPUs sum in an order that depends on the batch; use two")
    threads = _num_threads(raw, hardware, parallel)
    return Config(
        device=DeviceConfig(
            parallel.devices[0], dtype, threads, _overrides(raw, hardware, on_cpu), raw["deterministic"]
        ),
        parallel=parallel,
        loader=_loader(raw, model),
        kv_cache=_kv_cache(raw, dtype, on_cpu),
        memory=_memory(raw, on_cpu),
        tier=tier_of(raw),
        scheduler=scheduler,
        graphs=_graphs(raw, on_cpu, scheduler),
        sampling=SamplingConfig(raw["enable_nan_detection"], _at_least(raw, "input_logprob_chunk_tokens", 1)),
        admission=_admission(raw, model, max_model_len, parallel.tensor_size * parallel.data_size),
        grammar=_grammar(raw),
        log=LogConfig(
            "warning" if raw["log_level"] == "warn" else raw["log_level"],
            raw["enable_log_requests"],
            raw["log_requests_level"],
            raw["enable_log_request_stats"],
            _at_least(raw, "decode_log_interval", 0),
            parallel.data_rank or 0,
        ),
        operations=operations_of(raw),
        lane=LaneConfig(
            gateway_host(raw),
            _within(raw, "data_parallel_rpc_port", 1, 65535),
            _within(raw, "zmq_engine_index", 0, 65535),
            engine_curve(raw["zmq_curve_secret_key_file"], raw["zmq_curve_server_key"]),
        ),
        offline=OfflineConfig(
            raw["skip_tokenizer_init"],
            raw["stream_output"],
            preferred_params(json_object(raw, "preferred_sampling_params")),
        ),
    )


def _overrides(raw: Mapping[str, Any], hardware: Hardware, on_cpu: bool) -> tuple[str, ...]:
    """Of kernels; named sampling backends are some of them."""
    backend, named = raw["sampling_backend"], tuple(raw["kernel_override"])
    if backend in ("auto", "greedy"):
        return named
    if on_cpu:
        raise FlagError("--sampling-backend", f"{backend} needs a GPU; use auto")
    if backend.startswith("flashinfer"):
        if not hardware.flashinfer:
            message = f"{backend}: the package flashinfer-python is not installed; install it or use auto"
            raise FlagError("--sampling-backend", message)
        return ("sampling.sample=flashinfer", *named)
    return ("sampling.sample=triton", "sampling.penalties=triton", *named)


def _admission(raw: Mapping[str, Any], model: ModelFacts, max_model_len: int, num_ranks: int) -> AdmissionConfig:
    return AdmissionConfig(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        stream_interval=_at_least(raw, "stream_interval", 1),
        seed=raw["seed"],
        allow_custom_processors=raw["enable_custom_logit_processor"],
        grammar_backend=raw["grammar_backend"],
        always_greedy=raw["sampling_backend"] == "greedy",
        num_ranks=num_ranks,
    )


def _grammar(raw: Mapping[str, Any]) -> GrammarConfig:
    timeout_s = float(raw["grammar_compile_timeout_secs"])
    if not 0 < timeout_s < 1e6:
        raise FlagError("--grammar-compile-timeout-secs", f"{timeout_s:g} is not a time in seconds")
    return GrammarConfig(
        backend=raw["grammar_backend"],
        timeout_s=timeout_s,
        max_retries=_within(raw, "grammar_compile_max_retries", 0, 10),
        any_whitespace=not raw["disable_any_whitespace"],
        num_threads=2,
        cache_bytes=_at_least(raw, "grammar_cache_mib", 0) * 2**20,
        max_lost=4,
    )


def _device(raw: Mapping[str, Any], hardware: Hardware) -> str:
    wanted, index = raw["device"], _at_least(raw, "base_gpu_id", 0)
    if wanted == "cpu" or (wanted == "auto" and not hardware.usable_gpus):
        return "cpu"
    if not hardware.gpus:
        raise FlagError("--device", "cuda was asked for and no GPU is there; use --device cpu")
    if hardware.torch_cuda is None:
        raise FlagError("--device", "cuda was asked for and the installed torch is a CPU build; install a CUDA build")
    if index >= len(hardware.gpus):
        raise FlagError("--base-gpu-id", f"{index} was asked for and there are {len(hardware.gpus)} GPUs")
    return f"cuda:{index}"


def _dtype(raw: Mapping[str, Any], model: ModelFacts, on_cpu: bool) -> Dtype:
    if on_cpu:
        dtype = _DTYPE_NAMES.get(raw["dtype"], "float32")
        if dtype != "float32":
            raise FlagError("--dtype", f"{raw['dtype']}: the CPU computes in float32 (weights may be stored smaller)")
    else:
        own: Dtype = "float16" if "float16" in model.dtype and "bfloat16" not in model.dtype else "bfloat16"
        dtype = _DTYPE_NAMES.get(raw["dtype"], own)
    return dtype


def _loader(raw: Mapping[str, Any], model: ModelFacts) -> LoaderConfig:
    load_format, extra = raw["load_format"], json_object(raw, "model_loader_extra_config")
    if bool(extra) != (load_format == "extensible"):
        raise FlagError("--model-loader-extra-config", "goes with --load-format extensible, and that needs it")
    threads = _within(raw, "weight_loader_prefetch_num_threads", 0, 256)
    threads = 0 if raw["disable_weight_loader_prefetch_checkpoints"] else threads
    quantization = _quantization(raw["quantization"], model.quantization)
    return LoaderConfig(load_format, raw["tokenizer"], quantization, extra, threads)


def _quantization(flag: str | None, stored: Quantization | None) -> Quantization | None:
    """What `--quantization` and the checkpoint say together. Raises FlagError where they contradict each other."""
    if flag is None:
        return stored
    if stored == GGUF_TYPES:
        raise FlagError("--quantization", f"{flag}: a GGUF file brings its own types; leave the flag out")
    if stored is None:
        if flag not in ("fp8", "w8a8_fp8"):
            raise FlagError(
                "--quantization", f"{flag}: the checkpoint is not quantized so; only fp8 is made on loading"
            )
        return Quantization(flag, (QuantGroup(("Linear",), "fp8", (0, 0), rounds_inputs=True),), (), online=True)
    accepted = {stored.method} | ({"w8a8_fp8"} if all(group.kind == "fp8" for group in stored.groups) else set())
    accepted |= {group.kind for group in stored.groups if group.kind in ("nvfp4", "mxfp4")}
    if flag not in accepted:
        raise FlagError(
            "--quantization", f"{flag}: the checkpoint is quantized with {stored.method}; leave the flag out"
        )
    return stored


def _kv_cache(raw: Mapping[str, Any], dtype: Dtype, on_cpu: bool) -> KVCacheConfig:
    wanted, per_token_head = raw["kv_cache_dtype"], raw["kv_cache_quant_method"] == "per_token_head"
    if wanted in ("fp8", "fp8_e4m3"):
        if per_token_head and raw["quantization_param_path"] is not None:
            raise FlagError("--quantization-param-path", "per_token_head finds its own scales; give one of the two")
        return KVCacheConfig("float8_e4m3fn", per_token_head, raw["quantization_param_path"])
    if wanted == "mxfp8":
        raise FlagError("--kv-cache-dtype", "mxfp8: no kernel here reads it; use fp8_e4m3")
    for dest in ("kv_cache_quant_method", "quantization_param_path"):
        if raw[dest] not in (None, "none"):
            raise FlagError("--" + dest.replace("_", "-"), f"{raw[dest]}: needs --kv-cache-dtype fp8_e4m3")
    if wanted == "auto" or wanted == dtype:
        return KVCacheConfig(dtype, False, None)
    if not on_cpu:
        raise FlagError("--kv-cache-dtype", f"{wanted}: on a GPU blocks are stored as --dtype, here {dtype}, or as fp8")
    return KVCacheConfig(wanted, False, None)


def _num_threads(raw: Mapping[str, Any], hardware: Hardware, parallel: ParallelConfig) -> int:
    """Of one rank; those of a machine share its cores."""
    if raw["num_threads"] is None:
        return max(1, hardware.num_cpus // (len(parallel.devices) * parallel.data_size))
    return _within(raw, "num_threads", 1, 1024)


def _max_model_len(raw: Mapping[str, Any], model: ModelFacts) -> int:
    if raw["max_model_len"] is None:
        return model.max_position_embeddings
    asked = _at_least(raw, "max_model_len", 8)
    if asked > model.longest_context:
        raise FlagError("--max-model-len", f"{asked} is more than the model's {model.longest_context}")
    return asked


def _memory(raw: Mapping[str, Any], on_cpu: bool) -> MemoryConfig:
    share = raw["gpu_memory_utilization"]
    if share is None:
        share = _CPU_MEMORY_SHARE if on_cpu else _GPU_MEMORY_SHARE
    if not 0 < share <= 1:
        raise FlagError("--gpu-memory-utilization", f"{share} is not in (0, 1]")
    num_tokens, gib = raw["max_total_tokens"], raw["kv_cache_gib"]
    if num_tokens is not None and gib is not None:
        raise FlagError("--kv-cache-gib", "and --max-total-tokens both say how large the pool is; give one")
    if num_tokens is not None:
        _at_least(raw, "max_total_tokens", _block_size(raw))
    if gib is not None and not 0 < gib < 1e6:
        raise FlagError("--kv-cache-gib", f"{gib} is not a size in GiB")
    return MemoryConfig(_block_size(raw), share, num_tokens, None if gib is None else int(gib * 2**30))


def _block_size(raw: Mapping[str, Any]) -> int:
    if raw["block_size"] not in _BLOCK_SIZES:
        raise FlagError("--block-size", f"{raw['block_size']} is not one of {', '.join(map(str, _BLOCK_SIZES))}")
    return int(raw["block_size"])


def _scheduler(raw: Mapping[str, Any], model: ModelFacts, on_cpu: bool, max_model_len: int) -> SchedulerLimits:
    max_num_seqs = 32 if on_cpu else 160
    if raw["max_num_seqs"] is not None:
        max_num_seqs = _within(raw, "max_num_seqs", 1, 4096)
    chunk = raw["chunked_prefill_size"]
    if chunk is None:
        chunk = 512 if on_cpu else 8192
    elif chunk != -1:
        chunk = _at_least(raw, "chunked_prefill_size", 1)
    chunked = chunk != -1
    # Every running request decodes in every step, so a step's budget covers them, with room for a prefill to advance.
    budget = max(chunk if chunked else _at_least(raw, "max_prefill_tokens", 1), max_num_seqs + 1)
    gap = 256 if on_cpu else 8192
    if raw["max_decode_gap"] is not None:
        gap = _at_least(raw, "max_decode_gap", 1)
    return SchedulerLimits(
        block_size=_block_size(raw),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_batched_tokens=budget,
        chunked_prefill=chunked,
        overlap_depth=_overlap_depth(raw),
        max_decode_gap_tokens=min(gap, budget) if chunked else budget,
        enable_prefix_caching=raw["enable_prefix_caching"],
        eos_token_ids=tuple(model.eos_token_ids),
    )


def _graphs(raw: Mapping[str, Any], on_cpu: bool, scheduler: SchedulerLimits) -> GraphConfig:
    padded = not raw["disable_cuda_graph_padding"]
    if raw["enforce_eager"]:
        return GraphConfig((), padded, (), 0)
    largest = scheduler.max_num_seqs
    if raw["max_cudagraph_capture_size"] is not None:
        largest = min(_at_least(raw, "max_cudagraph_capture_size", 1), largest)
    asked = _sizes(raw, "cudagraph_capture_sizes", largest)
    if on_cpu:
        limit = largest if raw["max_cudagraph_capture_size"] else min(largest, RECORDED_ROWS)
        return GraphConfig(tuple(range(1, limit + 1)) if asked is None else asked, False, (), 0)
    sizes = capture_sizes(largest) if asked is None else asked
    if raw["disable_prefill_graph"]:
        return GraphConfig(sizes, padded, (), 0)
    most = raw["prefill_graph_max_tokens"]
    if most is not None:
        most = min(_at_least(raw, "prefill_graph_max_tokens", 0), scheduler.max_batched_tokens)
    prefill = _sizes(raw, "prefill_graph_capture_token_sizes", most or scheduler.max_batched_tokens)
    return GraphConfig(sizes, padded, () if most == 0 else prefill or (), most)


def _sizes(raw: Mapping[str, Any], dest: str, largest: int) -> tuple[int, ...] | None:
    """What was asked for, up to `largest`; None when nothing was."""
    if raw[dest] is None:
        return None
    asked = sorted(set(raw[dest]))
    if not asked or asked[0] < 1:
        raise FlagError("--" + dest.replace("_", "-"), f"{asked} are not sizes")
    return tuple(size for size in asked if size <= largest)


def _overlap_depth(raw: Mapping[str, Any]) -> int:
    if raw["overlap_depth"] is None:
        return 0 if raw["disable_overlap_schedule"] else 1
    depth = _within(raw, "overlap_depth", 0, 1)
    if depth and raw["disable_overlap_schedule"]:
        raise FlagError("--disable-overlap-schedule", f"contradicts --overlap-depth {depth}")
    return depth


def _at_least(raw: Mapping[str, Any], dest: str, low: int) -> int:
    value = int(raw[dest])
    if value < low:
        raise FlagError("--" + dest.replace("_", "-"), f"{value} is less than {low}")
    return value


def _within(raw: Mapping[str, Any], dest: str, low: int, high: int) -> int:
    value = int(raw[dest])
    if not low <= value <= high:
        raise FlagError("--" + dest.replace("_", "-"), f"{value} is not in [{low}, {high}]")
    return value
