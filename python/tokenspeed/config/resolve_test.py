# SPDX-License-Identifier: MIT
"""`resolve` as a table: flags, hardware and model in, slices or a named refusal out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import pytest

from tokenspeed.config.flags import FlagError, parse_flags
from tokenspeed.config.flags_table import ENGINE_FLAGS
from tokenspeed.config.hardware import Gpu, Hardware, detect
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.quantization import GGUF_TYPES, Quantization, quantization_from_json
from tokenspeed.config.resolve import Config, KVCacheConfig, resolve

H200 = Gpu("NVIDIA H200", 141 * 2**30, (9, 0))
LAPTOP = Hardware(8, 16 * 2**30, (), None)
SERVER = Hardware(64, 512 * 2**30, (H200, H200), "12.8")
WITH_FLASHINFER = replace(SERVER, flashinfer=True)
CPU_TORCH = Hardware(64, 512 * 2**30, (H200,), None)


@dataclass(frozen=True)
class Model:
    max_position_embeddings: int = 8192
    longest_context: int = 8192
    vocab_size: int = 49152
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = (2,)
    quantization: Quantization | None = None

    def check_ranks(self, num_ranks: int) -> None:
        if self.vocab_size % num_ranks:
            raise ModelError(f"{num_ranks} ranks cannot share it")


def resolved(argv: str, hardware: Hardware, model: Model | None = None) -> Config:
    return resolve(parse_flags(argv.split(), ENGINE_FLAGS).values, hardware, model or Model())


TABLE: list[tuple[str, Hardware, dict[str, Any]]] = [
    (
        "",
        LAPTOP,
        {
            "device.device": "cpu",
            "device.dtype": "float32",
            "device.num_threads": 8,
            "memory.share": 0.2,
            "scheduler.max_num_seqs": 32,
            "scheduler.max_batched_tokens": 512,
            "scheduler.max_decode_gap_tokens": 256,
            "scheduler.overlap_depth": 1,
            "scheduler.max_model_len": 8192,
            "scheduler.eos_token_ids": (2,),
            "scheduler.enable_prefix_caching": True,
            "admission.vocab_size": 49152,
        },
    ),
    (
        "",
        SERVER,
        {
            "device.device": "cuda:0",
            "device.dtype": "bfloat16",
            "memory.share": 0.9,
            "scheduler.max_num_seqs": 160,
            "scheduler.max_batched_tokens": 8192,
            "scheduler.max_decode_gap_tokens": 8192,
        },
    ),
    ("", CPU_TORCH, {"device.device": "cpu"}),
    ("--device cpu", SERVER, {"device.device": "cpu", "device.dtype": "float32", "device.num_threads": 64}),
    ("--device cuda --base-gpu-id 1", SERVER, {"device.device": "cuda:1"}),
    ("--dtype half", SERVER, {"device.dtype": "float16"}),
    ("--dtype bfloat16 --kv-cache-dtype bfloat16", SERVER, {"kv_cache": KVCacheConfig("bfloat16", False, None)}),
    ("", LAPTOP, {"kv_cache": KVCacheConfig("float32", False, None), "loader.quantization": None, "loader.extra": {}}),
    ("--kv-cache-dtype bfloat16", LAPTOP, {"device.dtype": "float32", "kv_cache.dtype": "bfloat16"}),
    ("--kv-cache-dtype fp8", LAPTOP, {"kv_cache": KVCacheConfig("float8_e4m3fn", False, None)}),
    (
        "--kv-cache-dtype fp8_e4m3 --quantization-param-path scales.json",
        SERVER,
        {"kv_cache": KVCacheConfig("float8_e4m3fn", False, "scales.json"), "device.dtype": "bfloat16"},
    ),
    (
        "--kv-cache-dtype fp8_e4m3 --kv-cache-quant-method per_token_head",
        LAPTOP,
        {"kv_cache": KVCacheConfig("float8_e4m3fn", True, None)},
    ),
    ("--load-format npcache", LAPTOP, {"loader.load_format": "npcache"}),
    (
        '--load-format extensible --model-loader-extra-config={"loader":"a:B"}',
        LAPTOP,
        {"loader.load_format": "extensible", "loader.extra": {"loader": "a:B"}},
    ),
    ("--quantization fp8", LAPTOP, {"loader.quantization.method": "fp8", "loader.quantization.online": True}),
    ("--quantization w8a8_fp8", SERVER, {"loader.quantization.online": True}),
    ("--num-threads 2 --seed 7", LAPTOP, {"device.num_threads": 2, "admission.seed": 7}),
    ("--max-model-len 100", LAPTOP, {"scheduler.max_model_len": 100, "admission.max_model_len": 100}),
    ("--max-total-tokens 4096", LAPTOP, {"memory.num_tokens": 4096, "memory.num_bytes": None}),
    ("--kv-cache-gib 0.5", LAPTOP, {"memory.num_bytes": 2**29, "memory.num_tokens": None}),
    ("--block-size 16", LAPTOP, {"memory.block_size": 16, "scheduler.block_size": 16}),
    # The budget always covers a decode of every running request and one token of prefill.
    ("--chunked-prefill-size 4 --max-num-seqs 16", LAPTOP, {"scheduler.max_batched_tokens": 17}),
    (
        "--chunked-prefill-size -1 --max-prefill-tokens 4000",
        LAPTOP,
        {
            "scheduler.chunked_prefill": False,
            "scheduler.max_batched_tokens": 4000,
            "scheduler.max_decode_gap_tokens": 4000,
        },
    ),
    ("--max-decode-gap 64", LAPTOP, {"scheduler.max_decode_gap_tokens": 64}),
    ("--disable-overlap-schedule", LAPTOP, {"scheduler.overlap_depth": 0}),
    ("--overlap-depth 0", LAPTOP, {"scheduler.overlap_depth": 0}),
    ("--disable-prefix-caching", LAPTOP, {"scheduler.enable_prefix_caching": False}),
    ("--deterministic", LAPTOP, {"device.device": "cpu", "device.deterministic": True}),
    ("--deterministic", SERVER, {"device.device": "cuda:0", "device.deterministic": True}),
    ("", SERVER, {"device.deterministic": False}),
    ("--kernel-override attention.paged=x", LAPTOP, {"device.kernel_overrides": ("attention.paged=x",)}),
    ("", LAPTOP, {"admission.always_greedy": False, "device.kernel_overrides": ()}),
    ("--sampling-backend greedy", LAPTOP, {"admission.always_greedy": True}),
    (
        "--sampling-backend triton_full",
        SERVER,
        {"device.kernel_overrides": ("sampling.sample=triton", "sampling.penalties=triton")},
    ),
    ("--sampling-backend triton", SERVER, {"admission.always_greedy": False}),
    *(
        (
            f"--sampling-backend {name}",
            WITH_FLASHINFER,
            {"device.kernel_overrides": ("sampling.sample=flashinfer",), "admission.always_greedy": False},
        )
        for name in ("flashinfer", "flashinfer_full")
    ),
    ("", WITH_FLASHINFER, {"device.kernel_overrides": ()}),
    ("", SERVER, {"operations.marks_steps": False}),
    ("--enable-nvtx", SERVER, {"operations.marks_steps": True}),
    ("", LAPTOP, {"sampling.detects_nan": False, "sampling.scored_at_once": 256, "loader.num_read_ahead": 8}),
    (
        "--enable-nan-detection --input-logprob-chunk-tokens 32 --weight-loader-prefetch-num-threads 3",
        LAPTOP,
        {"sampling.detects_nan": True, "sampling.scored_at_once": 32, "loader.num_read_ahead": 3},
    ),
    ("--disable-weight-loader-prefetch-checkpoints", LAPTOP, {"loader.num_read_ahead": 0}),
    (
        '--preferred-sampling-params {"temperature":0.6,"top_k":20}',
        LAPTOP,
        {"offline.preferred_params": {"temperature": 0.6, "top_k": 20}},
    ),
    ("", LAPTOP, {"grammar.backend": "xgrammar", "grammar.any_whitespace": True, "grammar.timeout_s": 30.0}),
    (
        "--grammar-backend none --disable-any-whitespace",
        LAPTOP,
        {"grammar.backend": "none", "grammar.any_whitespace": False},
    ),
    ("--log-level warn --log-requests-level 2", LAPTOP, {"log.log_level": "warning", "log.log_requests_level": 2}),
    ("--data-parallel-rpc-port 31000 --zmq-engine-index 3", LAPTOP, {"lane.port": 31000, "lane.engine_index": 3}),
    ("", LAPTOP, {"graphs.sizes": tuple(range(1, 17)), "graphs.padded": False, "graphs.most_prefill_tokens": 0}),
    ("--max-num-seqs 3", LAPTOP, {"graphs.sizes": (1, 2, 3)}),
    ("--max-num-seqs 20 --max-cudagraph-capture-size 18", LAPTOP, {"graphs.sizes": tuple(range(1, 19))}),
    ("--cudagraph-capture-sizes 2 1", LAPTOP, {"graphs.sizes": (1, 2)}),
    ("--enforce-eager", LAPTOP, {"graphs.sizes": ()}),
    ("--max-num-seqs 20", SERVER, {"graphs.sizes": (1, 2, 3, 4, 8, 16, 20), "graphs.most_prefill_tokens": None}),
    ("--max-num-seqs 1", SERVER, {"graphs.sizes": (1,), "graphs.padded": True}),
    ("--max-num-seqs 20 --max-cudagraph-capture-size 9", SERVER, {"graphs.sizes": (1, 2, 3, 4, 8, 9)}),
    ("--max-num-seqs 20 --max-cudagraph-capture-size 90", SERVER, {"graphs.sizes": (1, 2, 3, 4, 8, 16, 20)}),
    ("--max-num-seqs 20 --cudagraph-capture-sizes 16 2 99", SERVER, {"graphs.sizes": (2, 16)}),
    ("--disable-cuda-graph-padding", SERVER, {"graphs.padded": False}),
    ("--enforce-eager", SERVER, {"graphs.sizes": (), "graphs.most_prefill_tokens": 0}),
    ("--disable-prefill-graph", SERVER, {"graphs.prefill_sizes": (), "graphs.most_prefill_tokens": 0}),
    ("--prefill-graph-max-tokens 99999", SERVER, {"graphs.most_prefill_tokens": 8192}),
    ("--prefill-graph-capture-token-sizes 512 64", SERVER, {"graphs.prefill_sizes": (64, 512)}),
    ("", LAPTOP, {"parallel.tensor_size": 1, "parallel.devices": ("cpu",), "admission.num_ranks": 1}),
    (
        "--tp 2",
        LAPTOP,
        {
            "parallel.tensor_size": 2,
            "parallel.devices": ("cpu", "cpu"),
            "device.num_threads": 4,
            "admission.num_ranks": 2,
            "parallel.timeout_s": 180.0,
        },
    ),
    ("--tp 2", SERVER, {"device.device": "cuda:0", "parallel.devices": ("cuda:0", "cuda:1")}),
    ("--attn-tp-size 2 --dense-tp-size 2 --world-size 2", SERVER, {"parallel.tensor_size": 2}),
    (
        "--data-parallel-size 2",
        LAPTOP,
        {"parallel.data_size": 2, "parallel.data_rank": None, "device.num_threads": 4},
    ),
    (
        "--data-parallel-size 2 --data-parallel-rank 1 --zmq-engine-index 4 --rl-control-port 9000 --metrics-port 0",
        SERVER,
        {
            "parallel.data_rank": 1,
            "device.device": "cuda:1",
            "lane.engine_index": 5,
            "operations.control_port": 9001,
            "operations.metrics_port": 0,
            "log.data_rank": 1,
        },
    ),
    ("--tp 2 --data-parallel-size 2 --world-size 4 --nprocs-per-node 4", LAPTOP, {"device.num_threads": 2}),
    ("--distributed-timeout-seconds 7", LAPTOP, {"parallel.timeout_s": 7.0}),
    (
        "--tp 4 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:2000",
        SERVER,
        {
            "parallel.devices": ("cuda:0", "cuda:1"),
            "parallel.first_rank": 2,
            "parallel.init_host": "10.0.0.1",
            "parallel.init_port": 2000,
        },
    ),
    ("--dist-init-addr 127.0.0.1:2000", LAPTOP, {"parallel.init_host": None}),
]


@pytest.mark.parametrize(("argv", "hardware", "expected"), TABLE, ids=lambda value: str(value)[:50])
def test_slices(argv: str, hardware: Hardware, expected: dict[str, Any]) -> None:
    config = resolved(argv, hardware)
    assert {path: attrgetter(path)(config) for path in expected} == expected


REFUSED = [
    ("--sampling-backend triton", LAPTOP, "--sampling-backend", "GPU"),
    ("--sampling-backend flashinfer", SERVER, "--sampling-backend", "flashinfer-python is not installed"),
    ("--sampling-backend flashinfer_full", LAPTOP, "--sampling-backend", "GPU"),
    ("--input-logprob-chunk-tokens 0", LAPTOP, "--input-logprob-chunk-tokens", "less than 1"),
    ("--weight-loader-prefetch-num-threads -1", LAPTOP, "--weight-loader-prefetch-num-threads", "[0, 256]"),
    ("--preferred-sampling-params {", LAPTOP, "--preferred-sampling-params", "not JSON"),
    ('--preferred-sampling-params {"stop":"x"}', LAPTOP, "--preferred-sampling-params", "stop is not one of"),
    ('--preferred-sampling-params {"top_p":2}', LAPTOP, "--preferred-sampling-params", "top_p"),
    ("--grammar-compile-timeout-secs 0", LAPTOP, "--grammar-compile-timeout-secs", "time"),
    ("--device cuda", LAPTOP, "--device", "no GPU"),
    ("--device cuda", CPU_TORCH, "--device", "CPU build"),
    ("--device cuda --base-gpu-id 2", SERVER, "--base-gpu-id", "there are 2 GPUs"),
    ("--tp 3", SERVER, "--tensor-parallel-size", "need GPU 2; there are 2 GPUs"),
    ("--tp 4 --deterministic", replace(SERVER, gpus=(H200,) * 4), "--deterministic", "more than two GPUs"),
    ("--tp 2 --gpu-id-step 2", SERVER, "--tensor-parallel-size", "in steps of 2, need GPU 2"),
    ("--tp 2 --data-parallel-size 2", SERVER, "--data-parallel-size", "need GPU 3"),
    ("--data-parallel-size 2 --data-parallel-rank 2", LAPTOP, "--data-parallel-rank", "not in [0, 1]"),
    ("--tp 0", LAPTOP, "--tensor-parallel-size", "0 is not a number from 1 on"),
    ("--tp 2 --attn-tp-size 1", LAPTOP, "--attn-tp-size", "--tensor-parallel-size is 2"),
    ("--dense-tp-size 2 --moe-tp-size 4", LAPTOP, "--moe-tp-size", "--dense-tp-size is 2"),
    ("--tp 2 --world-size 4", LAPTOP, "--world-size", "make it 2"),
    ("--tp 4 --nnodes 2 --dist-init-addr a:1 --nprocs-per-node 4", LAPTOP, "--nprocs-per-node", "make it 2"),
    ("--tp 2 --nnodes 2", LAPTOP, "--dist-init-addr", "need the address"),
    ("--tp 3 --nnodes 2 --dist-init-addr a:1", LAPTOP, "--nnodes", "3 ranks do not divide"),
    ("--tp 2 --nnodes 2 --dist-init-addr a:1 --node-rank 2", LAPTOP, "--node-rank", "not in [0, 1]"),
    ("--dist-init-addr nowhere", LAPTOP, "--dist-init-addr", "must be host:port"),
    ("--data-parallel-size 2 --nnodes 2 --dist-init-addr a:1 --tp 2", LAPTOP, "--data-parallel-size", "own"),
    ("--dtype bfloat16", LAPTOP, "--dtype", "float32"),
    ("--kv-cache-dtype bfloat16 --dtype half", SERVER, "--kv-cache-dtype", "float16"),
    ("--kv-cache-dtype mxfp8", SERVER, "--kv-cache-dtype", "fp8_e4m3"),
    ("--kv-cache-quant-method per_token_head", LAPTOP, "--kv-cache-quant-method", "--kv-cache-dtype fp8_e4m3"),
    ("--quantization-param-path x", LAPTOP, "--quantization-param-path", "--kv-cache-dtype fp8_e4m3"),
    (
        "--kv-cache-dtype fp8 --kv-cache-quant-method per_token_head --quantization-param-path x",
        LAPTOP,
        "--quantization-param-path",
        "give one",
    ),
    ("--load-format extensible", LAPTOP, "--model-loader-extra-config", "extensible"),
    ('--model-loader-extra-config={"loader":"a:B"}', LAPTOP, "--model-loader-extra-config", "extensible"),
    ("--load-format extensible --model-loader-extra-config={", LAPTOP, "--model-loader-extra-config", "not JSON"),
    ("--load-format extensible --model-loader-extra-config=[1]", LAPTOP, "--model-loader-extra-config", "object"),
    ("--quantization mxfp4", LAPTOP, "--quantization", "not quantized so"),
    ("--quantization nvfp4", SERVER, "--quantization", "not quantized so"),
    ("--quantization compressed-tensors", LAPTOP, "--quantization", "not quantized so"),
    ("--max-model-len 9000", LAPTOP, "--max-model-len", "8192"),
    ("--max-model-len 7", LAPTOP, "--max-model-len", "less than 8"),
    ("--block-size 48", LAPTOP, "--block-size", "48"),
    ("--gpu-memory-utilization 1.5", SERVER, "--gpu-memory-utilization", "(0, 1]"),
    ("--gpu-memory-utilization nan", SERVER, "--gpu-memory-utilization", "(0, 1]"),
    ("--max-total-tokens 63", LAPTOP, "--max-total-tokens", "less than 64"),
    ("--kv-cache-gib 0", LAPTOP, "--kv-cache-gib", "GiB"),
    ("--kv-cache-gib 1 --max-total-tokens 640", LAPTOP, "--kv-cache-gib", "give one"),
    ("--max-num-seqs 0", LAPTOP, "--max-num-seqs", "[1, 4096]"),
    ("--chunked-prefill-size 0", LAPTOP, "--chunked-prefill-size", "less than 1"),
    ("--max-decode-gap 0", LAPTOP, "--max-decode-gap", "less than 1"),
    ("--overlap-depth 2", LAPTOP, "--overlap-depth", "[0, 1]"),
    ("--overlap-depth 1 --disable-overlap-schedule", LAPTOP, "--disable-overlap-schedule", "contradicts"),
    ("--num-threads 0", LAPTOP, "--num-threads", "[1, 1024]"),
    ("--stream-interval 0", LAPTOP, "--stream-interval", "less than 1"),
    ("--zmq-engine-index 65536", LAPTOP, "--zmq-engine-index", "65535"),
    ("--rl-control-host 0.0.0.0 --rl-control-port 9", LAPTOP, "--rl-control-host", "--rl-control-api-key"),
    ("--max-cudagraph-capture-size 0", SERVER, "--max-cudagraph-capture-size", "less than 1"),
    ("--cudagraph-capture-sizes 0 4", SERVER, "--cudagraph-capture-sizes", "not sizes"),
    ("--prefill-graph-max-tokens -1", SERVER, "--prefill-graph-max-tokens", "less than 0"),
]


@pytest.mark.parametrize(("argv", "hardware", "flag", "why"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_is_refused_by_flag(argv: str, hardware: Hardware, flag: str, why: str) -> None:
    with pytest.raises(FlagError) as caught:
        resolved(argv, hardware)
    assert caught.value.flag == flag and why in str(caught.value)


def test_ranks_that_cannot_share_a_model_are_refused_before_anything_runs() -> None:
    with pytest.raises(ModelError, match="5 ranks"):
        resolved("--tp 5", LAPTOP)


def stored(**config: Any) -> Model:
    """A model whose checkpoint is quantized."""
    return Model(quantization=quantization_from_json({"quantization_config": config}, "config.json"))


FP8 = stored(quant_method="fp8")
MXFP4 = stored(quant_method="mxfp4")
PACKED = stored(
    quant_method="compressed-tensors",
    format="pack-quantized",
    config_groups={"group_0": {"weights": {"type": "int", "num_bits": 4}}},
)


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        ("", FP8),
        ("--quantization fp8", FP8),
        ("--quantization w8a8_fp8", FP8),
        ("--quantization mxfp4", MXFP4),
        ("--quantization compressed-tensors", PACKED),
        ("--quantization nvfp4", stored(quant_method="modelopt", quant_algo="NVFP4")),
    ],
)
def test_flag_may_repeat_what_the_checkpoint_says(argv: str, model: Model) -> None:
    assert resolved(argv, LAPTOP, model).loader.quantization == model.quantization


@pytest.mark.parametrize(
    ("flag", "model", "why"),
    [
        ("fp8", PACKED, "quantized with compressed-tensors"),
        ("w8a8_fp8", MXFP4, "quantized with mxfp4"),
        ("fp8", Model(quantization=GGUF_TYPES), "GGUF"),
    ],
)
def test_flag_that_contradicts_the_checkpoint_is_refused(flag: str, model: Model, why: str) -> None:
    with pytest.raises(FlagError, match=why):
        resolved(f"--quantization {flag}", LAPTOP, model)


def test_resolve_is_pure() -> None:
    values = parse_flags(["--max-num-seqs", "5"], ENGINE_FLAGS).values
    before = dict(values)
    assert resolve(values, LAPTOP, Model()) == resolve(values, LAPTOP, Model())
    assert values == before


def test_this_machine_has_cores_and_memory() -> None:
    hardware = detect()
    assert hardware.num_cpus >= 1 and hardware.available_ram_bytes > 0
