# SPDX-License-Identifier: MIT
"""The flags that the engine and the supervisor honour: names, types, defaults, meaning. Data only.

A default of None means "decided by `config.resolve` from the hardware and the model". Flags that switch off what
does not exist here are honoured by nature and say so.
"""

from __future__ import annotations

from tokenspeed.config.flags import Flag
from tokenspeed.config.flags_output import OUTPUT_FLAGS
from tokenspeed.config.flags_rows import flag as _flag

_MODEL = "Model Loading"
_API, _MEMORY = "API Surface", "Scheduler And Memory"
_PRECISION, _PARALLEL = "Precision And Quantization", "Parallelism"
MODEL_FLAGS: tuple[Flag, ...] = (
    _flag(
        "--model --model-path",
        "str",
        None,
        _MODEL,
        "A folder with config.json and safetensors, a GGUF file, or a hub id; also the first word. "
        "None: the embedded SmolLM2-135M-Instruct.",
    ),
    _flag("--tokenizer", "str", None, _MODEL, "Folder, file or hub id of the tokenizer when it is not the model's."),
    _flag("--skip-tokenizer-init", "bool", False, _MODEL, "Offline engine: token ids in, token ids out, no text."),
    _flag(
        "--load-format",
        "str",
        "auto",
        _MODEL,
        "What the weights are read from. auto: the GGUF file, or the folder's safetensors, else its files of "
        "torch.save (pt). npcache: a copy as numpy files, made once. instanttensor: safetensors. dummy: random ones. "
        "extensible: a class of yours.",
        ("auto", "safetensors", "pt", "npcache", "gguf", "dummy", "extensible", "instanttensor"),
    ),
    _flag(
        "--model-loader-extra-config",
        "str",
        None,
        _MODEL,
        'JSON for --load-format extensible: {"loader": "module:Class"} and arguments of the class, which is called '
        "with the model's source and configuration before them and must be a tokenspeed.weights.WeightReader.",
    ),
    _flag(
        "--weight-loader-prefetch-num-threads",
        "int",
        8,
        _MODEL,
        "Threads that have the checkpoint's files read ahead of the loader; 0: none.",
    ),
    _flag("--disable-weight-loader-prefetch-checkpoints", "switch", False, _MODEL, "The same as 0 of these threads."),
    _flag(
        "--quantization",
        "str",
        None,
        _PRECISION,
        "fp8 or w8a8_fp8 quantizes a dense checkpoint while it loads. A checkpoint that is quantized says itself how; "
        "the flag may repeat it.",
        ("fp8", "mxfp4", "nvfp4", "w8a8_fp8", "compressed-tensors", "gptq", "awq"),
    ),
    _flag(
        "--hf-overrides",
        "str",
        None,
        _MODEL,
        'JSON object of values in place of those in the model\'s config.json: {"max_position_embeddings": 65536}.',
    ),
    _flag("--revision", "str", None, _MODEL, "Branch, tag or commit of a hub model."),
    _flag("--download-dir", "str", None, _MODEL, "Where downloads are kept."),
    _flag("--served-model-name", "str", None, _MODEL, "The name clients use; the model's own when not given."),
    _flag(
        "--max-model-len", "int", None, _MEMORY, "Prompt and output of a request in tokens; the model's when not given."
    ),
    _flag("--ext-yaml", "str", None, _MODEL, "YAML file that maps flags to values; the command line wins."),
    _flag("--language-model-only", "switch", False, _MODEL, "Load no vision tower. No model here has one."),
)

_DEVICE = "Backend Selection"
DEVICE_FLAGS: tuple[Flag, ...] = (
    _flag("--device", "str", "auto", _DEVICE, "auto: a GPU when there is one, else the CPU.", ("auto", "cpu", "cuda")),
    _flag(
        "--dtype",
        "str",
        "auto",
        _PRECISION,
        "Activations and dense weights. auto: float32 on the CPU, the model's own on a GPU.",
        ("auto", "half", "float16", "bfloat16", "float", "float32"),
    ),
    _flag(
        "--kv-cache-dtype",
        "str",
        "auto",
        _PRECISION,
        "auto: as --dtype. fp8 and fp8_e4m3: one byte a value, scaled by the checkpoint's k_scale and v_scale "
        "(1 without).",
        ("auto", "bfloat16", "fp8", "fp8_e4m3", "mxfp8"),
    ),
    _flag(
        "--kv-cache-quant-method",
        "str",
        "none",
        _PRECISION,
        "per_token_head: an fp8 cache with a scale for each head of each token, found when it is stored.",
        ("none", "per_token_head"),
    ),
    _flag(
        "--quantization-param-path",
        "str",
        None,
        _PRECISION,
        "A JSON file with one scale a layer for an fp8 cache, in place of the checkpoint's.",
    ),
    _flag(
        "--num-threads",
        "int",
        None,
        _DEVICE,
        "CPU threads of a rank's kernels; when not given, every usable core, divided among the ranks of the machine.",
    ),
    _flag("--base-gpu-id", "int", 0, _PARALLEL, "Index of the GPU, or of the first rank's."),
    _flag(
        "--gpu-memory-utilization",
        "float",
        None,
        _MEMORY,
        "Share of the GPU's memory for weights, activations and KV blocks (0.9). "
        "On the CPU: share of the available RAM for KV blocks (0.2).",
    ),
    _flag("--max-total-tokens", "int", None, _MEMORY, "Size of the KV pool in tokens, instead of a share of memory."),
    _flag("--kv-cache-gib", "float", None, _MEMORY, "Size of the KV pool in GiB, instead of a share of memory."),
    _flag(
        "--prefix-granularity --block-size",
        "int",
        64,
        _MEMORY,
        "Tokens in a KV block, a power of two from 8 to 256.",
        target="block_size",
    ),
    _flag(
        "--kvstore-ratio",
        "float",
        None,
        _DEVICE,
        "Host memory for KV blocks that the device has no room for, as a multiple of the device's pool; every rank has "
        "its own. 0, or not given: none.",
    ),
    _flag(
        "--kvstore-size", "float", 0, _DEVICE, "The same in GB (10^9 bytes) for each rank, instead of a ratio; 0: none."
    ),
    _flag(
        "--kvstore-io-backend",
        "str",
        "kernel",
        _DEVICE,
        "How a GPU's blocks move. kernel: the GPU reads and writes host memory. direct: a copy for each piece. "
        "A CPU has one way.",
        ("kernel", "direct"),
    ),
    _flag(
        "--kvstore-storage-backend",
        "str",
        None,
        _DEVICE,
        "Where blocks outlive the engine, behind host memory (2.0 times the device's pool unless a flag says "
        "otherwise). file: a folder of this machine.",
        ("file", "mooncake", "memory"),
    ),
    _flag(
        "--kvstore-storage-backend-extra-config",
        "str",
        None,
        _DEVICE,
        'JSON for it. file: {"path": "/folder", "max_gb": 64, "wait_s": 2}; wait_s: how long a request may wait for '
        "what is there.",
    ),
    _flag("--disable-kvstore", "switch", False, _DEVICE, "No host memory for KV blocks, whatever the other flags say."),
    _flag(
        "--enforce-eager",
        "switch",
        False,
        _MEMORY,
        "Every step is launched kernel by kernel: no CUDA graphs, on a CPU no recordings.",
    ),
    _flag(
        "--max-cudagraph-capture-size",
        "int",
        None,
        _MEMORY,
        "Largest batch of a captured decode step; --max-num-seqs when not given, on a CPU 16 at most. Larger batches "
        "run without graphs.",
    ),
    _flag(
        "--cudagraph-capture-sizes",
        "ints",
        None,
        _MEMORY,
        "Batch sizes to capture; when not given, a list that is dense for small batches and ends at the largest, on a "
        "CPU all up to it.",
    ),
    _flag(
        "--disable-cuda-graph-padding",
        "switch",
        False,
        _MEMORY,
        "Use a captured step only for batches of exactly its size.",
    ),
    _flag(
        "--prefill-graph-max-tokens",
        "int",
        None,
        _MEMORY,
        "Steps that prefill run their layers from CUDA graphs up to so many tokens; 0: never. When not given, as far "
        "as the host is measured to be slower than the GPU.",
    ),
    _flag(
        "--prefill-graph-capture-token-sizes",
        "ints",
        None,
        _MEMORY,
        "Numbers of tokens to capture the layers for; when not given, a list up to the largest.",
    ),
    _flag("--disable-prefill-graph", "switch", False, _MEMORY, "The same as --prefill-graph-max-tokens 0."),
    _flag("--disable-tf32", "switch", False, _PRECISION, "Full float32 products on GPUs. Always so here."),
    _flag(
        "--kernel-override",
        "append",
        (),
        _DEVICE,
        "op=solution: which kernel runs an operation (`ts kernels explain`).",
    ),
    _flag(
        "--deterministic",
        "switch",
        False,
        _DEVICE,
        "The same tokens alone or in any batch, cold or cached. The CPU always does that; GPUs take slower kernels.",
    ),
    _flag(
        "--sampling-backend",
        "str",
        "auto",
        _DEVICE,
        "What draws tokens. auto: the best kernels here; it never means greedy. triton, triton_full: Triton's (every "
        "backend honours every parameter). flashinfer, flashinfer_full: FlashInfer's filters with this engine's noise, "
        "where its package is installed. greedy: every request takes the likeliest token.",
        ("auto", "greedy", "triton", "triton_full", "flashinfer", "flashinfer_full"),
    ),
    _flag(
        "--preferred-sampling-params",
        "str",
        None,
        _API,
        'JSON object of sampling parameters for requests that do not say them: {"temperature": 0.6, "top_p": 0.95}. '
        "Before those of the model's generation_config.json.",
    ),
    _flag("--seed", "int", None, _API, "Base of the seeds of requests that bring none; random when not given."),
)

_ALIKE = "Must be the same as --tensor-parallel-size, or stand for it: layers of all kinds are split alike."
PARALLEL_FLAGS: tuple[Flag, ...] = (
    _flag(
        "--tensor-parallel-size --tp",
        "int",
        None,
        _PARALLEL,
        "Ranks that split every layer between them, a process and a device each (1).",
    ),
    *(
        _flag(name, "int", None, _PARALLEL, _ALIKE)
        for name in ("--attn-tp-size", "--attn-head-tp-size", "--dense-tp-size", "--moe-tp-size", "--lm-head-tp-size")
    ),
    _flag(
        "--data-parallel-size",
        "int",
        None,
        _PARALLEL,
        "Replicas of the engine (1), each with ranks and a KV pool of its own; the gateway shares requests out.",
    ),
    _flag(
        "--replica-restarts",
        "int",
        3,
        _PARALLEL,
        "How often in a row a replica that died is started again beside the others (gRPC, Engine, AsyncLLM); 0: never.",
    ),
    _flag(
        "--data-parallel-rank",
        "int",
        None,
        _PARALLEL,
        "This engine is that replica of those on this machine: its GPUs, its number on the lane and its ports come "
        "after the others'. When not given, all replicas are started.",
    ),
    _flag("--world-size", "int", None, _PARALLEL, "Ranks of all replicas and nodes; checked against the other flags."),
    _flag("--nnodes", "int", None, _PARALLEL, "Machines that the ranks are spread over (1). A Slurm step says it."),
    _flag("--node-rank", "int", None, _PARALLEL, "Which of the machines this is; 0 has the first rank and the lane."),
    _flag("--nprocs-per-node", "int", None, _PARALLEL, "Ranks of each machine; checked against the other flags."),
    _flag(
        "--dist-init-addr",
        "str",
        None,
        _PARALLEL,
        "host:port where the first machine waits for the ranks of the others; the port after it is used too.",
    ),
    _flag("--gpu-id-step", "int", 1, _PARALLEL, "From the GPU of one rank to that of the next."),
    _flag(
        "--distributed-timeout-seconds",
        "int",
        None,
        _PARALLEL,
        "How long a rank may be silent, or a step take, before the engine ends (180).",
    ),
)

_SCHEDULER = _MEMORY
SCHEDULER_FLAGS: tuple[Flag, ...] = (
    _flag("--max-num-seqs", "int", None, _SCHEDULER, "Requests that run at once (GPU 160, CPU 32)."),
    _flag(
        "--chunked-prefill-size",
        "int",
        None,
        _SCHEDULER,
        "Token budget of a step (GPU 8192, CPU 512). -1: prompts are never cut; see --max-prefill-tokens.",
    ),
    _flag("--max-prefill-tokens", "int", 8192, _SCHEDULER, "Token budget of a step when prompts are not cut."),
    _flag(
        "--max-decode-gap",
        "int",
        None,
        _SCHEDULER,
        "Prefill tokens between two tokens of a running request, at most (GPU 8192, CPU 256); those behind a long "
        "context count for more.",
    ),
    _flag("--overlap-depth", "int", None, _SCHEDULER, "Steps in flight while the next is planned: 0 or 1 (1)."),
    _flag("--disable-overlap-schedule", "switch", False, _SCHEDULER, "The same as --overlap-depth 0."),
    _flag(
        "--enable-mixed-batch", "switch", False, _SCHEDULER, "Decodes and prefill chunks in one step. Always so here."
    ),
    _flag("--enable-prefix-caching", "bool", True, _SCHEDULER, "Re-use KV blocks of equal prefixes."),
    _flag("--disable-prefix-caching", "off", False, _SCHEDULER, "No re-use.", target="enable_prefix_caching"),
)

_GRAMMAR = "Structured Output"
GRAMMAR_FLAGS: tuple[Flag, ...] = (
    _flag(
        "--grammar-backend",
        "str",
        "xgrammar",
        _GRAMMAR,
        "What compiles JSON schemas, regular expressions, EBNF and structural tags; none: such requests are refused.",
        ("xgrammar", "llguidance", "none"),
    ),
    _flag("--grammar-compile-timeout-secs", "float", 30.0, _GRAMMAR, "Time that compiling one constraint may take."),
    _flag(
        "--grammar-compile-max-retries", "int", 0, _GRAMMAR, "How often a compilation that took too long is retried."
    ),
    _flag("--grammar-cache-mib", "int", 256, _GRAMMAR, "Memory of compiled constraints that are kept, in MiB."),
    _flag("--disable-any-whitespace", "switch", False, _GRAMMAR, "No blanks between the parts of constrained JSON."),
    _flag(
        "--enable-custom-logit-processor",
        "switch",
        False,
        _GRAMMAR,
        "Requests may bring code that changes logits. It runs in the engine: only for callers that are trusted.",
    ),
)

_CONTROL = "Control"
CONTROL_FLAGS: tuple[Flag, ...] = (
    _flag(
        "--rl-control-port",
        "int",
        None,
        _CONTROL,
        "Port of the engine's own control endpoints; 0: a free one. `ts serve` passes them on at --control-port.",
    ),
    _flag("--rl-control-host", "str", "127.0.0.1", _CONTROL, "Address that they listen on."),
    _flag("--rl-control-api-key", "str", None, _CONTROL, "Key that callers must present: Authorization: Bearer <key>."),
    _flag("--weight-version", "str", "default", _API, "Name of the weights that the engine starts with."),
    _flag(
        "--enable-memory-saver",
        "switch",
        False,
        _CONTROL,
        "Let /release_memory_occupation give the memory of weights and KV blocks back while a trainer needs it.",
    ),
)

_LANE = "Headless Engine"
LANE_FLAGS: tuple[Flag, ...] = (
    _flag("--data-parallel-address", "str", "127.0.0.1", _LANE, "Host of the gateway's handshake."),
    _flag("--data-parallel-rpc-port", "int", 30500, _LANE, "Port of the gateway's handshake."),
    _flag("--zmq-engine-index", "int", 0, _LANE, "This engine's number on its lane."),
    _flag(
        "--zmq-curve-secret-key-file",
        "str",
        None,
        _LANE,
        "File with this engine's CURVE secret key (Z85): encrypts the lane; its gateway must know the public key.",
    ),
    _flag("--zmq-curve-server-key", "str", None, _LANE, "CURVE public key (Z85) of the gateway that is dialled."),
    _flag("--zmq-msgpack", "switch", True, _LANE, "msgpack on the lane. Always so here."),
)

# What switches off something that this engine does not do.
_NOTHING = "Nothing To Switch Off"
NOTHING_FLAGS: tuple[Flag, ...] = tuple(
    _flag(name, "switch", False, _NOTHING, "Accepted: the feature that it switches off does not exist here.")
    for name in (
        "--disable-capturable-grammar",
        "--disable-flashinfer-cutlass-moe-fp4-allgather",
        "--disable-pdl",
        "--disable-nccl-nvls",
        "--disable-symm-mem",
        "--disable-kda-prefill-graph",
        "--disable-cudagraph-memory-reserve",
        "--disable-sampling-tp-sync",
        "--disable-replay-ssm",
        "--mla-disable-ragged",
        "--disable-autotune --disable-flashinfer-autotune",
    )
)

HONOURED: tuple[Flag, ...] = (
    MODEL_FLAGS
    + DEVICE_FLAGS
    + PARALLEL_FLAGS
    + SCHEDULER_FLAGS
    + GRAMMAR_FLAGS
    + OUTPUT_FLAGS
    + CONTROL_FLAGS
    + LANE_FLAGS
    + NOTHING_FLAGS
)
