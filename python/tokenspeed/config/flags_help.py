# SPDX-License-Identifier: MIT
"""Flags as people read them: the groups and their order are those of the operators' page of server parameters.

`PAGE` places the flags that the page names; a flag that it does not name follows in the group of its own row. Refused
flags are shown, with the reason, where the page names them. Data and formatting only; `tools/docs` uses the same order.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from tokenspeed.config.flags import Flag

PAGE: tuple[tuple[str, str], ...] = (
    (
        "Model Loading",
        "--model --tokenizer --tokenizer-mode --skip-tokenizer-init --load-format --trust-remote-code --revision "
        "--download-dir --hf-overrides",
    ),
    (
        "Precision And Quantization",
        "--dtype --kv-cache-dtype --kv-cache-quant-method --quantization --quantization-param-path",
    ),
    (
        "API Surface",
        "--host --port --served-model-name --api-key --chat-template --stream-interval --stream-output "
        "--weight-version",
    ),
    (
        "Scheduler And Memory",
        "--max-model-len --gpu-memory-utilization --max-num-seqs --chunked-prefill-size --max-prefill-tokens "
        "--max-total-tokens --prefix-granularity --enable-prefix-caching --disable-prefix-caching --enforce-eager "
        "--max-cudagraph-capture-size --cudagraph-capture-sizes",
    ),
    (
        "Parallelism",
        "--tensor-parallel-size --attn-tp-size --dense-tp-size --moe-tp-size --data-parallel-size "
        "--mm-encoder-tp-mode --enable-expert-parallel --expert-parallel-size --world-size --nprocs-per-node --nnodes "
        "--node-rank --dist-init-addr",
    ),
    (
        "Backend Selection",
        "--attention-backend --drafter-attention-backend --moe-backend --draft-moe-backend --all2all-backend "
        "--deepep-mode --sampling-backend --dp-sampling",
    ),
    (
        "Reasoning And Tool Calling",
        "--reasoning-parser --tool-call-parser --enable-custom-logit-processor",
    ),
    (
        "Speculative Decoding",
        "--speculative-config --speculative-algorithm --speculative-draft-model-path "
        "--speculative-draft-model-quantization --speculative-num-steps --speculative-num-draft-tokens "
        "--speculative-eagle-topk --eagle3-layers-to-capture",
    ),
    (
        "Observability",
        "--log-level --log-level-http --enable-log-requests --log-requests-level --enable-log-request-stats "
        "--enable-metrics --metrics-reporters --decode-log-interval --enable-cache-report --kv-events-config",
    ),
    (
        "TokenSpeed-Specific Runtime Knobs",
        "--disable-kvstore --kvstore-ratio --kvstore-size --kvstore-io-backend --kvstore-storage-backend "
        "--kvstore-storage-backend-extra-config --enable-mla-l1-5-cache --mla-chunk-multiplier --disaggregation-mode "
        "--disaggregation-bootstrap-port --disaggregation-transfer-backend --disaggregation-ib-device "
        "--disaggregation-layerwise-interval --comm-fusion-max-num-tokens --enable-allreduce-fusion",
    ),
)
_GROUP = {name: group for group, names in PAGE for name in names.split()}
_PLACE = {name: place for place, name in enumerate(name for _, names in PAGE for name in names.split())}
_ALSO = (
    "--max-total-tokens --max-prefill-tokens --chunked-prefill-size --attn-tp-size --dense-tp-size --moe-tp-size "
    "--kv-events-config"
)
"""Those of the page's last group that an earlier one has too."""
_OPERANDS = {"append": "STR (repeatable)", "ints": "INT ..."}
_WIDTH = 118


def arranged(table: Iterable[Flag]) -> list[tuple[str, list[Flag]]]:
    """The flags of a server by group, in the page's order; other groups follow in the order of the table."""
    groups: dict[str, list[Flag]] = {group: [] for group, _ in PAGE}
    for flag in table:
        groups.setdefault(_GROUP.get(flag.name, flag.group), []).append(flag)
    last = len(_PLACE)
    return [(group, sorted(flags, key=lambda f: _PLACE.get(f.name, last))) for group, flags in groups.items() if flags]


def on_page(table: Iterable[Flag]) -> list[Flag]:
    """Those that the page names."""
    return [flag for flag in table if flag.name in _GROUP]


def server_help(table: Iterable[Flag]) -> str:
    """For `--help` of a server: the honoured flags, and the refused ones that the page names."""
    text = _written(arranged(flag for flag in table if not flag.refusal or flag.name in _GROUP))
    last = PAGE[-1][0]
    return text.replace(f"{last}:\n", f"{last}:\n  and, above: {', '.join(_ALSO.split())}\n")


def help_text(table: Iterable[Flag]) -> str:
    """For `--help` of another command: the honoured flags, in the order of the table."""
    groups: dict[str, list[Flag]] = {}
    for flag in table:
        if not flag.refusal:
            groups.setdefault(flag.group, []).append(flag)
    return _written(groups.items())


def _written(groups: Iterable[tuple[str, Sequence[Flag]]]) -> str:
    return "\n\n".join("\n".join([f"{group}:", *_lines(flags)]) for group, flags in groups)


def _lines(flags: Sequence[Flag]) -> list[str]:
    lines: list[str] = []
    for flag in flags:
        names = ", ".join([*flag.names, *(f"--no-{name[2:]}" for name in flag.names if flag.kind == "bool")])
        word = "|".join(map(str, flag.choices)) or _OPERANDS.get(flag.kind, flag.kind.upper())
        value = f" {word}" if flag.takes_value else ""
        default = "" if flag.default in (None, False, (), "") or flag.kind == "off" else f" (default {_said(flag)})"
        text = f"Refused: {flag.refusal}." if flag.refusal else flag.help + default
        wrapped = textwrap.wrap(text, _WIDTH - 6, break_on_hyphens=False)
        lines += [f"  {names}{value}", *(f"      {line}" for line in wrapped)]
    return lines


def _said(flag: Flag) -> str:
    if isinstance(flag.default, bool):
        return "on" if flag.default else "off"
    return " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else str(flag.default)
