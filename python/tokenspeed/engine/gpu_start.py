# SPDX-License-Identifier: MIT
"""How a GPU's memory is dealt out at start: weights are there, a worst step is run and measured, decode steps are
captured, and what is left of the share becomes KV blocks.

Called once by `core`, on the thread that loads. Everything that is measured is measured on the device, nothing is
estimated; when something does not fit, `OutOfMemory` names the number to change.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.config.resolve import Config, SchedulerLimits
from tokenspeed.config.sampling import MAX_LOGPROBS, SamplingParams
from tokenspeed.engine import memory, synthetic
from tokenspeed.engine.device_state import DeviceState
from tokenspeed.engine.errors import OutOfMemory
from tokenspeed.engine.graphs import CudaSteps, DecodeGraphs
from tokenspeed.engine.kv_pool import KVCaches, ReservedPool
from tokenspeed.engine.pieces import CudaPieces, PrefillPieces, sizes_up_to
from tokenspeed.engine.ranks import Ranks, first
from tokenspeed.engine.recorder import CudaRecorder
from tokenspeed.engine.runner import Captured
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.cache import LayerCache, total_block_bytes
from tokenspeed.models.model import Model
from tokenspeed.models.shortage import asked_bytes
from tokenspeed.sampling import Sampler

logger = logging.getLogger("tokenspeed.engine")

_PROBE_TOKENS = 2048
_ROUNDS = 3
_FRAGMENTATION = 8
"""One part in so many of a step's activations is kept free for the gaps that an allocator leaves."""


@dataclass(frozen=True)
class Started:
    """What a device is ready with. pool: of a GPU, where the caches lie."""

    pool: ReservedPool | None
    caches: KVCaches
    num_blocks: int
    captured: Captured


def start_gpu(
    config: Config, model: Model, layers: list[LayerCache], sampler: Sampler, state: DeviceState, ranks: Ranks
) -> Started:
    """Measure, capture, size, map; what is measured on several ranks is agreed upon. Raises OutOfMemory."""
    device, limits = state.device, config.scheduler
    free, total = torch.cuda.mem_get_info(device)
    weights, block_bytes = total - free, total_block_bytes(layers)
    # Addresses cost nothing: reserve for more than could ever be mapped.
    most = total // block_bytes + memory.PADDING_BLOCKS
    pool = ReservedPool(layers, most, device)
    caches = pool.grow(1)
    with _out_of_memory_names("--chunked-prefill-size", device):
        activations = _worst_step_bytes(model, sampler, state, caches, limits)
        _compile_eager_steps(model, state, caches, limits)
    before_graphs = _used_bytes(device)
    with _out_of_memory_names("--max-num-seqs or --max-cudagraph-capture-size", device):
        captured = _capture(config, model, sampler, state, caches, ranks)
    after_graphs = _used_bytes(device)
    parts = memory.GpuParts(total, after_graphs, activations + activations // _FRAGMENTATION)
    logger.info(
        "GPU memory: %.2f GiB in use after loading, %.2f GiB of graphs, %.2f GiB for a step's activations",
        weights / 2**30,
        (after_graphs - before_graphs) / 2**30,
        parts.activation_bytes / 2**30,
    )
    free_bytes = memory.gpu_free_bytes(parts, config.memory.share)
    num_blocks = memory.num_kv_blocks(config.memory, limits, block_bytes, free_bytes, parts)
    num_blocks = ranks.agree("KV blocks", num_blocks, min)
    try:
        caches = pool.grow(num_blocks)
    except (RuntimeError, ValueError) as error:
        flag = memory.sizing_flag(config.memory)
        raise OutOfMemory(f"{flag}: {num_blocks} KV blocks do not fit in the GPU's memory ({error})") from None
    return Started(pool, caches, num_blocks, captured)


def _capture(
    config: Config, model: Model, sampler: Sampler, state: DeviceState, caches: KVCaches, ranks: Ranks
) -> Captured:
    """Pieces first: they are the largest, and what comes later finds its memory in theirs."""
    started_s = time.monotonic()
    recorder = CudaRecorder(state.device)
    decode, prefill = None, None
    # A class attribute counts for the page that has it, not for pages made from that one.
    if vars(type(model)).get("cuts_at_attention", False):
        sizes = tuple(ranks.agree("prefill sizes", _prefill_sizes(config, model, state, caches), first))
        if sizes:
            prefill = PrefillPieces(sizes, state.device)
            prefill.capture(model, synthetic.batch_of(state, caches, 0, [1]), caches, CudaPieces(recorder))
            logger.info("captured the layers of up to %d tokens in %.1f s", sizes[-1], time.monotonic() - started_s)
    started_s = time.monotonic()
    if config.graphs.sizes:
        num_buffers = config.scheduler.overlap_depth + 2
        steps = CudaSteps(recorder)
        decode = DecodeGraphs(config.graphs.sizes, config.graphs.padded, state, num_buffers, steps)
        try:
            decode.capture(model, sampler, caches)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # An operation that asks the device for a number cannot be captured; some models have no other solution yet.
            logger.warning("decode runs without CUDA graphs, which this model's kernels do not allow: %s", error)
            return Captured(None, prefill)
        seconds = time.monotonic() - started_s
        logger.info("captured decode steps of %d sizes in %.1f s", len(config.graphs.sizes), seconds)
    return Captured(decode, prefill)


def _prefill_sizes(config: Config, model: Model, state: DeviceState, caches: KVCaches) -> tuple[int, ...]:
    """Numbers of tokens to capture layers for: as far as the host is slower than the device, unless flags say more."""
    graphs, limits = config.graphs, config.scheduler
    if graphs.prefill_sizes:
        return graphs.prefill_sizes
    if graphs.most_prefill_tokens is not None:
        return sizes_up_to(graphs.most_prefill_tokens) if graphs.most_prefill_tokens else ()
    probe = min(_PROBE_TOKENS, limits.max_batched_tokens, limits.max_model_len)
    launch_s, _ = _eager_times(model, synthetic.batch_of(state, caches, 0, [min(16, probe)]))
    _, run_s = _eager_times(model, synthetic.batch_of(state, caches, 0, [probe]))
    logger.info("eager layers: %.1f ms to launch, %.1f ms for %d tokens", 1e3 * launch_s, 1e3 * run_s, probe)
    largest = min(int(probe * launch_s / run_s) // 64 * 64, limits.max_batched_tokens)
    return sizes_up_to(largest) if largest else ()


@torch.inference_mode()
def _eager_times(model: Model, batch: ForwardBatch) -> tuple[float, float]:
    """Seconds until the host has launched the layers, and until the device has run them: the least of a few rounds,
    since a host that was interrupted once says nothing."""
    launches, runs = [], []
    for _ in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        model.hidden(batch)
        launches.append(time.perf_counter() - started_s)
        torch.cuda.synchronize()
        runs.append(time.perf_counter() - started_s)
    return min(launches[1:]), min(runs[1:])


@contextlib.contextmanager
def _out_of_memory_names(flag: str, device: torch.device) -> Iterator[None]:
    """An allocation that fails inside is an OutOfMemory that names the flag to lower."""
    free, total = (number / 2**30 for number in torch.cuda.mem_get_info(device))
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{flag}: beside the weights {free:.1f} of the GPU's {total:.1f} GiB are free, and what it asks for takes "
            f"more (a tensor of {asked_bytes(error) / 2**30:.1f} GiB had no room); lower it"
        ) from None


@torch.inference_mode()
def _worst_step_bytes(
    model: Model, sampler: Sampler, state: DeviceState, caches: KVCaches, limits: SchedulerLimits
) -> int:
    """Bytes that the widest step allocates: as many tokens as a step may have, every slot's worth of logits, and the
    dearest way to sample them."""
    torch.cuda.synchronize(state.device)
    torch.cuda.reset_peak_memory_stats(state.device)
    before = torch.cuda.memory_allocated(state.device)
    batch = synthetic.batch_of(state, caches, 0, synthetic.widest(limits))
    slots = torch.arange(limits.max_num_seqs, device=state.device)
    everything = SamplingParams(
        temperature=1.0, top_p=0.9, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={0: 0.5}, seed=1
    )
    sampler.set_slot(0, everything, np.zeros(1, np.int32), np.zeros(0, np.int32), None)
    logits = model.forward(batch)
    sampler.sample(logits, slots, batch.attention.kv_lens.long(), MAX_LOGPROBS, np.arange(len(slots)))
    torch.cuda.synchronize(state.device)
    return torch.cuda.max_memory_allocated(state.device) - before


@torch.inference_mode()
def _compile_eager_steps(model: Model, state: DeviceState, caches: KVCaches, limits: SchedulerLimits) -> None:
    started_s = time.monotonic()
    routed = model.config.moe is not None
    for num_decodes, query_lens in synthetic.every_kind(limits, routed):
        model.forward(synthetic.batch_of(state, caches, num_decodes, query_lens))
    torch.cuda.synchronize(state.device)
    logger.info("ran every kind of eager step in %.1f s", time.monotonic() - started_s)


def _used_bytes(device: torch.device) -> int:
    """On the whole device, by whomever; without what torch merely keeps for later."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
