# SPDX-License-Identifier: MIT
"""Which machine of several this is, when Slurm has started the command on all of them and no flag says so. Pure.

`srun --nodes 2 --ntasks-per-node 1 ts serve --tp 16`: the step's variables give `--nnodes`, `--node-rank` and
`--dist-init-addr`. They are read only when the ranks are more than this machine has room for (its GPUs, or
`--nprocs-per-node`): a server on each of several machines is as usual a thing to start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenspeed.config.flags import FlagError

_FLAGS = ("nnodes", "node_rank", "dist_init_addr")
_FIRST_PORT, _NUM_PORTS = 30000, 2500
"""Below the ports that systems hand out; each job of a machine has a pair of its own."""


def with_slurm(raw: Mapping[str, Any], environment: Mapping[str, str], num_gpus: int) -> dict[str, Any]:
    """raw: `ParsedFlags.values`; the same with what Slurm says. Raises FlagError when its tasks are not one a node."""
    values = dict(raw)
    nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    ranks = max(values[name] or 1 for name in ("tensor_parallel_size", "attn_tp_size", "dense_tp_size", "moe_tp_size"))
    room = values["nprocs_per_node"] or (num_gpus if values["device"] != "cpu" else 0)
    if nodes < 2 or not room or ranks <= room or any(values[name] is not None for name in _FLAGS):
        return values
    if _number(environment, "SLURM_STEP_NUM_TASKS") != nodes:
        raise FlagError("--nnodes", f"Slurm runs this step on {nodes} nodes: start it with --ntasks-per-node 1")
    port = _FIRST_PORT + _number(environment, "SLURM_JOB_ID") * 2 % _NUM_PORTS
    host = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    values.update(nnodes=nodes, node_rank=_number(environment, "SLURM_NODEID"), dist_init_addr=f"{host}:{port}")
    return values


def first_host(nodes: str) -> str:
    """Of a list as Slurm writes it: `gpu[07-09,12],cpu1` begins with gpu07. Raises FlagError for what is no list."""
    match = re.match(r"([\w.-]*)(?:\[(\w+)[^\]]*\]([\w.-]*))?(?:,|$)", nodes)
    if match is None or not match.group(0):
        raise FlagError("--dist-init-addr", f"SLURM_STEP_NODELIST {nodes!r} names no machine; give the flag")
    prefix, first, suffix = match.groups(default="")
    return prefix + first + suffix


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0
