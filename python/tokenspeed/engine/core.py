# SPDX-License-Identifier: MIT
"""Puts an engine together: weights, measured memory, KV blocks, scheduler, sampler, executor, loop. And its thread.

`build` is called once a process, by `headless` (a lane as frontend) or by `offline` (an in-process queue). The order
is the promise: weights first, then the worst step is measured and decode steps are captured, then the KV pool takes
what is left, then every path that traffic can reach is run once (`warmup`), and only then is the engine ready.
"""

from __future__ import annotations

import functools
import gc
import logging
import secrets
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import tokenspeed_cc
from tokenspeed.config.flags import FlagError
from tokenspeed.config.hardware import Hardware
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.resolve import Config, DeviceConfig, SchedulerLimits
from tokenspeed.config.work import context_cost_tokens
from tokenspeed.engine import memory
from tokenspeed.engine.admission import Admission, Grammars
from tokenspeed.engine.compiles import LateCompiles
from tokenspeed.engine.device_state import DeviceState
from tokenspeed.engine.executor import Executor, InlineExecutor, StreamExecutor, ThreadExecutor
from tokenspeed.engine.gpu_start import Started, start_gpu
from tokenspeed.engine.grammars import grammar_compiler
from tokenspeed.engine.kv_feed import KvFeed
from tokenspeed.engine.kv_publisher import KvPublisher
from tokenspeed.engine.leader import Leader, lead
from tokenspeed.engine.local_frontend import LocalFrontend
from tokenspeed.engine.loop import EngineLoop, nothing
from tokenspeed.engine.loop_calls import LoopCalls
from tokenspeed.engine.messages import Frontend
from tokenspeed.engine.model_loader import ModelLoader
from tokenspeed.engine.new_weights import NewWeights, WeightsFrom
from tokenspeed.engine.nodes import RankDoor, model_facts
from tokenspeed.engine.occupation import DeviceOccupation, HostOccupation, Occupation, RankMemory
from tokenspeed.engine.operations import Operations
from tokenspeed.engine.placed_weights import PlacedWeights
from tokenspeed.engine.ports import EnginePorts
from tokenspeed.engine.ranks import Alone, Ranks, first
from tokenspeed.engine.records import RequestTable
from tokenspeed.engine.replay import DecodeRecordings
from tokenspeed.engine.runner import NOTHING_CAPTURED, Captured, ModelRunner
from tokenspeed.engine.step_log import StepLog
from tokenspeed.engine.step_metrics import StepMetrics
from tokenspeed.engine.step_ranges import StepRanges, step_ranges
from tokenspeed.engine.tier_start import StartedTier, checkpoint_files, num_host_blocks, scheduler_store, start_tier
from tokenspeed.engine.trainer_groups import TrainerGroups
from tokenspeed.engine.warmup import warm_up
from tokenspeed.engine.weight_updates import Serving, Sources, WeightUpdates
from tokenspeed.grammar import GrammarCompiler
from tokenspeed.layers.cache import LayerCache, total_block_bytes
from tokenspeed.models import overwrite
from tokenspeed.models.model import Model
from tokenspeed.observability.engine_metrics import EngineMetrics
from tokenspeed.observability.traces import TracesUnavailable, make_tracer
from tokenspeed.sampling import Sampler, SamplerConfig
from tokenspeed.version import __version__
from tokenspeed_kernel.registry import KernelError, Signature, parse_overrides, select, set_overrides

logger = logging.getLogger("tokenspeed.engine")

Progress = Callable[[str], None]

SWITCH_INTERVAL_S = 0.0002
"""The loop and the forward thread trade the interpreter's lock many times a step; the default 5 ms is a whole step."""


@dataclass(frozen=True)
class EngineCore:
    """A warm engine that nobody steps yet."""

    config: Config
    loop: EngineLoop
    executor: Executor
    num_blocks: int
    late_compiles: LateCompiles
    grammars: GrammarCompiler
    operations: Operations
    ports: EnginePorts
    kv_feed: KvFeed
    kv_events: KvPublisher | None
    tier: StartedTier | None
    ranks: Ranks
    metrics: EngineMetrics

    def close(self) -> None:
        """End the threads and the other ranks; nothing may be in flight. What the engine holds goes with the last
        reference to it: no cycle is left."""
        self.loop.after_turn = nothing
        self.ranks.close()
        self.executor.close()
        if self.tier is not None:
            self.tier.close()
        self.late_compiles.stop()
        self.grammars.close()
        self.ports.close()
        self.operations.updates.close()
        self.loop.log.tracer.close()
        if self.kv_events is not None:
            self.kv_events.close()


def start(
    config: Config, source: ModelSource, model_config: ModelConfig, hardware: Hardware, progress: Progress
) -> EngineCore:
    """`build` with as many ranks as `config` says; this process is the first of them."""
    if config.parallel.node_rank:
        raise FlagError(
            "--node-rank", f"{config.parallel.node_rank}: only the commands start such a node, not `Engine`"
        )
    if config.parallel.data_rank is None:
        raise FlagError(
            "--data-parallel-size", "a process has one replica: `ts serve` starts them all, --data-parallel-rank one"
        )
    if config.parallel.tensor_size == 1:
        return build(config, source, model_config, hardware, progress, Alone())
    # Every rank draws the seeds that requests do not bring, so all begin at one number.
    seed = secrets.randbits(63) if config.admission.seed is None else config.admission.seed
    config = replace(config, admission=replace(config.admission, seed=seed))
    progress(f"starting {config.parallel.tensor_size} ranks")
    ranks = _all_ranks(config, source, model_config, hardware)
    try:
        return build(config, source, model_config, hardware, progress, ranks)
    except BaseException:
        ranks.close()
        raise


def _all_ranks(config: Config, source: ModelSource, model_config: ModelConfig, hardware: Hardware) -> Leader:
    if config.parallel.num_nodes == 1:
        return lead(config, source, model_config, hardware, None)
    door = RankDoor(config.parallel, model_facts(config, model_config))
    try:
        return lead(config, source, model_config, hardware, door.peers)
    finally:
        door.close()


def build(
    config: Config,
    source: ModelSource,
    model_config: ModelConfig,
    hardware: Hardware,
    progress: Progress,
    ranks: Ranks,
) -> EngineCore:
    """Load, measure, allocate, warm up. The loop has an in-process frontend; `loop.frontend` may be replaced before
    the first step. Raises what loading raises (ModelError), OutOfMemory, FlagError."""
    prepare_device(config.device)
    device = torch.device(config.device.device)
    on_cpu, memory_saver = device.type == "cpu", config.operations.memory_saver
    grammars = grammar_compiler(config, source, model_config)
    progress("loading weights")
    loader = ModelLoader(config, model_config, ranks)
    model = loader.load(source)
    ranks.agree("weights", None, first)
    placed = PlacedWeights(model, device) if memory_saver and not on_cpu else None
    layers = loader.caches(model)
    state = _device_state(config.scheduler, device)
    sampler = _sampler(config, model_config, state)
    if on_cpu:
        started = _start_cpu(config, layers, state, hardware, ranks)
    else:
        progress("capturing decode steps")
        started = _start_gpu(config, model, layers, sampler, state, ranks)
    host_blocks = num_host_blocks(config, started.num_blocks, layers, ranks)
    cost, store = context_cost_tokens(model.config), scheduler_store(config.tier)
    limits = scheduler_config(config.scheduler, started.num_blocks, host_blocks, cost, store)
    scheduler = tokenspeed_cc.Scheduler(limits)
    runner = ModelRunner(
        model,
        sampler,
        started.caches,
        scheduler.block_tables(),
        state,
        config.scheduler.overlap_depth + 2,
        config.sampling.scored_at_once,
        started.captured,
    )
    executor = _executor(runner, config)
    metrics = EngineMetrics(config.operations.served_name or source.name, config.operations.app_key)
    loop = _loop(config, scheduler, executor, ranks, ranks.grammars(grammars), metrics)
    tier = None
    if config.tier is not None:
        files = checkpoint_files(source, config.loader.load_format)
        tier = start_tier(config, host_blocks, started.caches, loop, ranks, files, [model_config])
        _use_tier(loop, tier, ranks)
    if ranks.leads:  # the others repeat what it does
        progress("warming up")
        warm_up(loop, config)
    late_compiles = LateCompiles(metrics.compiled_late)
    if not on_cpu and ranks.leads:  # another rank has still to repeat the warm-up
        late_compiles.watch()
    kv_feed = KvFeed(scheduler, config.memory.block_size, config.parallel.data_rank or 0)
    kv_events = _publisher(config, kv_feed) if config.operations.kv_events.publishes and ranks.leads else None
    # Captured steps hold the addresses of a GPU's weights.
    put = runner.replace_model if on_cpu else functools.partial(overwrite, model)
    sources = Sources(
        NewWeights(loop, ranks, loader.load_beside, put, loader.sent),
        TrainerGroups(loop, ranks, loader.sent, device, config.parallel.timeout_s),
    )
    first_weights = WeightsFrom(source, config.loader.load_format)
    serving = Serving(first_weights, model_config, config.operations.weight_version)
    occupation = _occupation(runner, started, placed) if memory_saver else None
    operations = _operations(loop, serving, sources, RankMemory(loop, ranks, occupation))
    loop.after_turn = _after_turn(operations, kv_feed, ranks)
    ports = EnginePorts(config.operations, metrics, operations, facts_of(config, started.num_blocks, host_blocks))
    return EngineCore(
        config,
        loop,
        executor,
        started.num_blocks,
        late_compiles,
        grammars,
        operations,
        ports,
        kv_feed,
        kv_events,
        tier,
        ranks,
        metrics,
    )


def _device_state(limits: SchedulerLimits, device: torch.device) -> DeviceState:
    """As large as the tables of the scheduler that these limits make, whatever its pool."""
    tables = tokenspeed_cc.Scheduler(scheduler_config(limits, num_blocks=2)).block_tables()
    num_slots, num_columns = tables.shape
    return DeviceState(num_slots, num_columns, limits.block_size, device, mirrored=device.type != "cpu")


def _sampler(config: Config, model_config: ModelConfig, state: DeviceState) -> Sampler:
    num_slots, eos_token_ids = state.padding_slot + 1, model_config.eos_token_ids
    return Sampler(
        SamplerConfig(num_slots, model_config.vocab_size, state.device, eos_token_ids, config.sampling.detects_nan)
    )


def _start_cpu(
    config: Config, layers: list[LayerCache], state: DeviceState, hardware: Hardware, ranks: Ranks
) -> Started:
    neighbours = len(config.parallel.devices) * config.parallel.data_size
    free_bytes = memory.cpu_free_bytes(hardware.available_ram_bytes, config.memory.share / neighbours)
    num_blocks = memory.num_kv_blocks(config.memory, config.scheduler, total_block_bytes(layers), free_bytes, None)
    num_blocks = ranks.agree("KV blocks", num_blocks, min)
    caches = [tuple(tensor.allocate(num_blocks, state.device) for tensor in layer) for layer in layers]
    captured = NOTHING_CAPTURED
    if config.graphs.sizes and ranks.group.size == 1:  # ranks meet within a step
        captured = Captured(None, None, DecodeRecordings(config.graphs.sizes, state))
    return Started(None, caches, num_blocks, captured)


def _start_gpu(
    config: Config, model: Model, layers: list[LayerCache], sampler: Sampler, state: DeviceState, ranks: Ranks
) -> Started:
    try:
        return start_gpu(config, model, layers, sampler, state, ranks)
    except KernelError as error:
        if not config.device.deterministic:
            raise
        raise FlagError("--deterministic", f"this model cannot be served so on this GPU: {error}") from None


def _loop(
    config: Config,
    scheduler: tokenspeed_cc.Scheduler,
    executor: Executor,
    ranks: Ranks,
    grammars: Grammars,
    metrics: EngineMetrics,
) -> EngineLoop:
    requests = RequestTable()
    loop = EngineLoop(
        scheduler,
        executor,
        LocalFrontend(),
        Admission(config.admission, scheduler, requests, grammars),
        requests,
        StepLog(config.log, scheduler, requests, StepMetrics(metrics, scheduler, requests)),
        config.scheduler.overlap_depth,
    )
    loop.mirror = ranks.mirror
    loop.profiler.rank = f"dp{config.parallel.data_rank}-tp{ranks.group.rank}"
    loop.leads = ranks.leads
    loop.ranges = _step_ranges(config)
    loop.log.muted = not ranks.leads
    try:
        loop.log.tracer = make_tracer("tokenspeed-engine", config.operations.traces_endpoint if ranks.leads else None)
    except TracesUnavailable as error:
        raise FlagError("--enable-trace", str(error)) from None
    return loop


def _step_ranges(config: Config) -> StepRanges:
    try:
        return step_ranges(config.operations.marks_steps, torch.device(config.device.device))
    except RuntimeError as error:
        raise FlagError("--enable-nvtx", str(error)) from None


def _use_tier(loop: EngineLoop, tier: StartedTier, ranks: Ranks) -> None:
    loop.tier = tier.end
    if tier.store is not None:
        loop.admission.keep_private(ranks.agree("salts", secrets.randbits(60), first))


def _publisher(config: Config, feed: KvFeed) -> KvPublisher:
    publisher = KvPublisher(config.operations.kv_events, config.lane.engine_index, config.memory.block_size)
    feed.subscribe(publisher.take)
    feed.enable()
    return publisher


def _occupation(runner: ModelRunner, started: Started, placed: PlacedWeights | None) -> Occupation:
    """placed: of a GPU, whose blocks lie in a pool then."""
    if placed is None or started.pool is None:
        return HostOccupation(runner, started.caches)
    return DeviceOccupation(started.pool, started.num_blocks, placed)


def _operations(loop: EngineLoop, serving: Serving, sources: Sources, rank_memory: RankMemory) -> Operations:
    calls = LoopCalls()
    return Operations(loop, calls, WeightUpdates(loop, calls, serving, sources, rank_memory), rank_memory)


def _after_turn(operations: Operations, kv_feed: KvFeed, ranks: Ranks) -> Callable[[], None]:
    def after_turn() -> None:
        ranks.check()
        operations.calls.run()
        kv_feed.gather()

    return after_turn


def facts_of(config: Config, num_blocks: int, host_blocks: int) -> dict[str, Any]:
    """What /get_server_info tells of an engine."""
    limits = config.scheduler
    return {
        "version": __version__,
        "device": config.device.device,
        "dtype": config.device.dtype,
        "num_blocks": num_blocks - 1,
        "num_host_blocks": host_blocks,
        "block_size": limits.block_size,
        "max_total_num_tokens": (num_blocks - 1) * limits.block_size,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "sampling_backend": _sampling_backend(config),
        "tensor_parallel_size": config.parallel.tensor_size,
        "data_parallel_size": config.parallel.data_size,
        "data_parallel_rank": config.parallel.data_rank,
    }


def _sampling_backend(config: Config) -> str:
    """What draws tokens: greedy, or the solution's name."""
    if config.admission.always_greedy:
        return "greedy"
    device = torch.device(config.device.device).type
    return select("sampling.sample", Signature(device, torch.float32, ())).name


def prepare_device(device: DeviceConfig) -> None:
    """Process-wide settings of the libraries below: threads, kernel overrides, precision."""
    try:
        set_overrides(parse_overrides(",".join(device.kernel_overrides)), device.deterministic)
    except KernelError as error:
        raise FlagError("--kernel-override", str(error)) from None
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if device.device == "cpu":
        import tokenspeed_kernel._cpu as cpu_kernels

        cpu_kernels.set_num_threads(device.num_threads)
        # The kernels bring their own threads; those of torch would only spin on the same cores after its small ops.
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(device.num_threads)
        torch.cuda.set_device(device.device)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def release_memory(device: DeviceConfig) -> None:
    """Give back what a closed engine held that nobody refers to any more, and what torch keeps of it for later."""
    if device.device == "cpu":
        return
    gc.collect()
    torch.cuda.empty_cache()


def scheduler_config(
    limits: SchedulerLimits,
    num_blocks: int,
    host_blocks: int = 0,
    context_cost: int = 0,
    store: tokenspeed_cc.StoreConfig | None = None,
) -> tokenspeed_cc.SchedulerConfig:
    """context_cost: `config.work.context_cost_tokens` of the model."""
    return tokenspeed_cc.SchedulerConfig(
        num_blocks=num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        chunked_prefill=limits.chunked_prefill,
        overlap_depth=limits.overlap_depth,
        verify_width=1,
        max_decode_gap_tokens=limits.max_decode_gap_tokens,
        context_cost_tokens=context_cost,
        enable_prefix_caching=limits.enable_prefix_caching,
        eos_token_ids=list(limits.eos_token_ids),
        num_host_blocks=host_blocks,
        store=store,
    )


def _executor(runner: ModelRunner, config: Config) -> Executor:
    if config.device.device != "cpu":
        return StreamExecutor(runner, config.scheduler.overlap_depth + 2, config.scheduler.max_num_seqs)
    return ThreadExecutor(runner) if config.scheduler.overlap_depth else InlineExecutor(runner)


class LoopThread:
    """Runs a loop on its own thread until `stop`; a death reaches every caller of the in-process frontend."""

    def __init__(self, core: EngineCore, frontend: LocalFrontend) -> None:
        self._frontend = frontend
        self._stopping = threading.Event()
        if isinstance(core.ranks, Leader):
            # The loop may wait for a device that waits for a rank; callers must not.
            core.ranks.on_loss = frontend.fail
        self._thread = threading.Thread(target=self._run, args=(core,), name="engine-loop", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """The loop will end after the steps in flight."""
        self._stopping.set()
        self._frontend.deliver([])

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End the loop after the steps in flight. May be called twice. False: it still runs."""
        self.ask_to_stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, core: EngineCore) -> None:
        cause: BaseException | None = None
        try:
            core.loop.run(self._stopping.is_set)
        except BaseException as error:
            error = core.ranks.cause(error)
            logger.error("the engine's loop died", exc_info=error)
            # Callers keep the error, and its frames, this one too, would keep a device's memory.
            traceback.clear_frames(error.__traceback__)
            cause = error
        finally:
            core.close()
            del core
            self._frontend.fail(cause)


def set_frontend(core: EngineCore, frontend: Frontend) -> None:
    """Before the first step only."""
    core.loop.frontend = frontend
