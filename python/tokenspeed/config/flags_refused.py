# SPDX-License-Identifier: MIT
"""The flags that operators know from TokenSpeed and that this release refuses, each with the reason. Data only.

A refused flag still parses, so that the refusal names it; where a value asks for nothing beyond what happens
anyway (`--pipeline-parallel-size 1`), that value passes.
"""

from __future__ import annotations

from tokenspeed.config.flags import Flag
from tokenspeed.config.flags_rows import refused_flag as _no

_WHOLE_LAYERS = "every rank has a part of every layer; see --tensor-parallel-size"
_WHOLE_CONTEXT = "every rank has the whole context, and a part of the heads"
_ONE_ORDER = "sums over ranks have one order already"
_LEAST_LOADED = "the gateway gives a request to the replica with the fewest in flight"
_FUSION = "sums over ranks are NCCL's, and norms are kernels of their own"
_SAMPLING = "every rank draws every token, from the same logits"
_EXPERTS = "every rank holds a part of each expert: experts are split as other layers are"
_GRAPHS = "prefill is captured by tokens, whatever the batch; see --prefill-graph-capture-token-sizes"
_KVSTORE = "KV blocks lie on the device, in host memory or in a folder: see --kvstore-ratio"
_PD = "this release serves prefill and decode in one engine"
_MODEL_UPDATER = "weights are not pulled from a Mooncake store: trainers send them to the control port or name a folder"
_SPECULATION = "this release has no speculative decoding"
_BACKEND = "kernels are chosen per operation: see --kernel-override and `ts kernels explain`"
_ARCHITECTURE = "it belongs to an architecture that this release does not have"
_NUMERICS = "this release has one order of every computation"


_PARALLEL = (
    _no("--pipeline-parallel-size", "int", 1, _WHOLE_LAYERS),
    _no("--pp-layer-partition", "str", None, _WHOLE_LAYERS),
    _no("--load-balance-method", "str", "shortest_queue", _LEAST_LOADED),
    _no("--load-watch-interval", "float", 0.02, _LEAST_LOADED),
    _no("--decode-context-parallel-size", "int", 1, _WHOLE_CONTEXT),
    _no("--prefill-context-parallel-size", "int", 1, _WHOLE_CONTEXT),
    _no("--tp-batch-invariant", "str", "none", _ONE_ORDER),
    _no("--force-deterministic-rsag", "switch", False, _ONE_ORDER),
    _no("--batch-invariant-collectives", "switch", False, _ONE_ORDER),
    _no("--dp-sampling", "switch", False, _SAMPLING),
    _no("--dp-sampling-min-bs", "int", None, _SAMPLING),
    _no("--comm-fusion-max-num-tokens", "int", 2048, _FUSION),
    _no("--enable-allreduce-fusion", "switch", False, _FUSION),
)

_MOE = (
    _no("--expert-parallel-size --ep-size", "int", 1, _EXPERTS),
    _no("--enable-expert-parallel", "switch", False, _EXPERTS),
    _no("--init-expert-location", "str", "trivial", _EXPERTS),
    _no("--ep-num-redundant-experts", "int", 0, _EXPERTS),
    _no("--ep-dispatch-algorithm", "str", None, _EXPERTS),
    _no("--eplb-algorithm", "str", "auto", _EXPERTS),
    _no("--expert-distribution-recorder-mode", "str", None, _EXPERTS),
    _no("--enable-eplb", "switch", False, _EXPERTS),
    _no("--eplb-rebalance-num-iterations", "int", None, _EXPERTS),
    _no("--eplb-rebalance-layers-per-chunk", "int", None, _EXPERTS),
    _no("--moe-backend", "str", "auto", _BACKEND),
    _no("--moe-mxfp4-fp8-activation", "switch", False, _NUMERICS),
    _no("--draft-moe-backend", "str", None, _SPECULATION),
    _no("--all2all-backend", "str", "none", _EXPERTS),
    _no("--deepep-mode", "str", "auto", _EXPERTS),
    _no("--low-latency-max-num-tokens-per-gpu", "int", 256, _EXPERTS),
    _no("--moe-combine-order", "str", "rank", _EXPERTS),
    _no("--router-topk", "str", "fused", _BACKEND),
)

_KERNELS = (
    _no("--dense-gemm-backend", "str", "auto", _BACKEND),
    _no("--attention-backend", "str", None, _BACKEND),
    _no("--kda-backend", "str", "auto", _BACKEND),
    _no("--mm-attention-backend", "str", None, _BACKEND),
    _no("--sampling-stream", "str", "batch", _BACKEND),
    _no("--skip-softmax-threshold", "float", 0.0, _BACKEND),
    _no("--prefill-graph-capture-sizes", "ints", None, _GRAPHS),
    _no("--prefill-graph-capture-batch-sizes", "ints", None, _GRAPHS),
    _no("--enable-cudagraph-gc", "switch", False, "graphs are captured with the collector as it is"),
    _no("--numerics", "str", "auto", _NUMERICS),
    _no("--layer-boundary-norm", "str", "fused", _NUMERICS),
    _no("--logprob-order", "str", "torch", _NUMERICS),
)

_WEIGHTS = (
    _no("--tokenizer-mode", "str", "auto", "there is one tokenizer implementation"),
    _no("--trust-remote-code", "bool", False, "code of a model repository is never run"),
    _no("--mamba-ssm-dtype", "str", "float32", _ARCHITECTURE),
    _no("--enable-replay-ssm", "switch", True, _ARCHITECTURE),
    _no(
        "--attention-use-fp4-indexer-cache --attention-config.use-fp4-indexer-cache "
        "--attention_config.use_fp4_indexer_cache",
        "str",
        None,
        _ARCHITECTURE,
        "false",
    ),
    _no(
        "--attention-config.use-trtllm-ragged-deepseek-prefill --attention-config.use_trtllm_ragged_deepseek_prefill "
        "--attention_config.use_trtllm_ragged_deepseek_prefill",
        "str",
        None,
        _ARCHITECTURE,
        "false",
    ),
    _no("--deepseek-v4-mega-moe-max-num-tokens", "int", 0, _ARCHITECTURE),
    _no("--deepseek-v4-indexer-prefill-max-logits-mb", "int", 512, _ARCHITECTURE),
    _no("--deepseek-v4-prefill-chunk-size", "int", 4, _ARCHITECTURE),
    _no("--engram-host-table", "bool", False, _ARCHITECTURE),
    _no("--engram-host-table-dir", "str", None, _ARCHITECTURE),
    _no("--engram-host-table-layout", "str", "auto", _ARCHITECTURE),
    _no("--yarn-ramp-mask-device", "str", "cuda", _ARCHITECTURE),
    _no("--mla-lora-scale", "str", "folded", _ARCHITECTURE),
    _no("--mla-chunk-multiplier", "int", 4, _ARCHITECTURE),
    _no("--enable-mla-l1-5-cache", "switch", False, _KVSTORE),
    _no("--dsa-slot-order", "str", "selection", _ARCHITECTURE),
    _no("--mm-encoder-tp-mode", "str", "weights", _ARCHITECTURE),
)

_SPEC = (
    _no("--speculative-config --speculative_config", "str", None, _SPECULATION),
    _no("--speculative-algorithm", "str", None, _SPECULATION),
    _no("--speculative-draft-model-path", "str", None, _SPECULATION),
    _no("--draft-model-path-use-base", "switch", False, _SPECULATION),
    _no("--speculative-draft-model-quantization", "str", "unquant", _SPECULATION),
    _no("--speculative-num-steps", "int", 3, _SPECULATION),
    _no("--speculative-eagle-topk", "int", 1, _SPECULATION),
    _no("--speculative-num-draft-tokens", "int", None, _SPECULATION),
    _no("--enable-speculative-sampling", "switch", False, _SPECULATION),
    _no("--spec-reject-draft-prob-threshold", "float", 2.0, _SPECULATION),
    _no("--eagle3-layers-to-capture", "str", None, _SPECULATION),
    _no("--drafter-attention-backend", "str", None, _SPECULATION),
)

_TIERS = (
    _no("--disaggregation-mode", "str", "null", _PD),
    _no("--disaggregation-bootstrap-port", "int", 8998, _PD),
    _no("--disaggregation-transfer-backend", "str", "mooncake", _PD),
    _no("--disaggregation-ib-device", "str", None, _PD),
    _no("--disaggregation-layerwise-interval", "int", 1, _PD),
    _no("--pdlb-url", "str", None, _PD),
    _no("--model-update-config", "str", None, _MODEL_UPDATER),
    _no("--model-update-sdk-module", "str", None, _MODEL_UPDATER),
    _no("--model-update-engine-type", "str", None, _MODEL_UPDATER),
    _no("--model-update-draft-weights", "str", None, _MODEL_UPDATER),
)

REFUSED: tuple[Flag, ...] = _PARALLEL + _MOE + _KERNELS + _WEIGHTS + _SPEC + _TIERS
