# SPDX-License-Identifier: MIT
"""How many processes serve a model, where they run and how they find each other: resolved from flags. Pure.

A *replica* is one engine; `--data-parallel-size` replicas share nothing. A replica's ranks split every layer between
them (`--tensor-parallel-size`); the first of them leads, the others follow. A node is a machine: the first node's
engine waits at `--dist-init-addr` for the ranks of the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import FlagError

DEFAULT_TIMEOUT_S = 180.0
# Each of them may be given instead of --tensor-parallel-size, and must agree with it: all layers are split alike.
_SIZES = (
    "tensor_parallel_size",
    "attn_tp_size",
    "attn_head_tp_size",
    "dense_tp_size",
    "moe_tp_size",
    "lm_head_tp_size",
)
_MOST_RANKS = 1024


@dataclass(frozen=True)
class ParallelConfig:
    """One replica's ranks, seen from one of its nodes.

    tensor_size: ranks of the replica, over all nodes. data_size, data_rank: replicas, and which of them this is; None
    where nobody has said, so that whoever starts engines has to start them all.
    devices: what torch calls those of this node's ranks, in rank order. init_host, init_port: where the first rank
    listens for the ranks of other nodes; None with one node. timeout_s: how long a rank may be silent, or a step take.
    """

    tensor_size: int
    data_size: int
    data_rank: int | None
    num_nodes: int
    node_rank: int
    devices: tuple[str, ...]
    init_host: str | None
    init_port: int
    timeout_s: float

    @property
    def first_rank(self) -> int:
        """The first of this node's ranks."""
        return self.node_rank * len(self.devices)


def parallel_of(raw: Mapping[str, Any], device: str, num_gpus: int) -> ParallelConfig:
    """raw: `ParsedFlags.values`. device: of the first rank, "cpu" or "cuda:N"; num_gpus: of this node.

    Raises FlagError for sizes that contradict each other and for GPUs that are not there.
    """
    tensor = _agreed(raw, _SIZES) or 1
    data = _positive(raw, "data_parallel_size") or 1
    nodes, node_rank = _nodes(raw)
    world = tensor * data
    for dest, what in (("world_size", world), ("nprocs_per_node", world // nodes)):
        asked = _positive(raw, dest)
        if asked is not None and asked != what:
            raise FlagError(_flag(dest), f"{asked} was asked for; {_made_of(tensor, data, nodes)} make it {what}")
    if data > 1 and nodes > 1:
        raise FlagError(
            "--data-parallel-size",
            "replicas on several nodes are engines of their own: start each with its --zmq-engine-index",
        )
    if tensor % nodes:
        raise FlagError("--nnodes", f"{tensor} ranks do not divide among {nodes} nodes")
    host, port = _address(raw, nodes)
    local = tensor // nodes
    return ParallelConfig(
        tensor_size=tensor,
        data_size=data,
        data_rank=_data_rank(raw, data),
        num_nodes=nodes,
        node_rank=node_rank,
        # A replica that is started alone has nobody before it: `replica_values` has moved its GPUs already.
        devices=_devices(raw, device, local, data if raw["data_parallel_rank"] is None else 1, num_gpus),
        init_host=host,
        init_port=port,
        timeout_s=float(_positive(raw, "distributed_timeout_seconds") or DEFAULT_TIMEOUT_S),
    )


def replica_values(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The flags of the replica that `--data-parallel-rank` says this is: its GPUs, its number on the lane and its ports
    lie behind those of the replicas before it."""
    rank = raw["data_parallel_rank"]
    if not rank:
        return raw
    num_gpus = (_agreed(raw, _SIZES) or 1) * (_positive(raw, "gpu_id_step") or 1)
    moved = {"base_gpu_id": rank * num_gpus, "zmq_engine_index": rank}
    moved |= {port: rank for port in ("rl_control_port", "metrics_port") if raw[port]}
    return {**raw, **{dest: raw[dest] + by for dest, by in moved.items()}}


def _data_rank(raw: Mapping[str, Any], size: int) -> int | None:
    rank: int | None = raw["data_parallel_rank"]
    if rank is not None and not 0 <= rank < size:
        raise FlagError("--data-parallel-rank", f"{rank} is not in [0, {size - 1}] (--data-parallel-size {size})")
    return 0 if size == 1 else rank


def _devices(raw: Mapping[str, Any], device: str, local: int, data: int, num_gpus: int) -> tuple[str, ...]:
    step = _positive(raw, "gpu_id_step") or 1
    if device == "cpu":
        return ("cpu",) * local
    first = raw["base_gpu_id"]
    last = first + (local * data - 1) * step
    if last >= num_gpus:
        flag = "--tensor-parallel-size" if data == 1 else "--data-parallel-size"
        raise FlagError(
            flag,
            f"{local * data} ranks on this node, from GPU {first} on in steps of {step}, need GPU {last}; "
            f"there are {num_gpus} GPUs",
        )
    return tuple(f"cuda:{first + index * step}" for index in range(local))


def _nodes(raw: Mapping[str, Any]) -> tuple[int, int]:
    nodes, rank = _positive(raw, "nnodes") or 1, raw["node_rank"] or 0
    if not 0 <= rank < nodes:
        raise FlagError("--node-rank", f"{rank} is not in [0, {nodes - 1}] (--nnodes {nodes})")
    if nodes > 1 and not raw["dist_init_addr"]:
        raise FlagError("--dist-init-addr", "several nodes need the address of the first one, host:port")
    return nodes, rank


def _address(raw: Mapping[str, Any], nodes: int) -> tuple[str | None, int]:
    """Where the first rank listens. With one node nobody has to find it, and the address is only checked."""
    text = raw["dist_init_addr"]
    if not text:
        return None, 0
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise FlagError("--dist-init-addr", f"{text!r} must be host:port")
    return (host, int(port)) if nodes > 1 else (None, 0)


def gateway_host(raw: Mapping[str, Any]) -> str:
    """Where a headless engine finds its gateway. Raises FlagError for what can be no host's name or address."""
    host: str = raw["data_parallel_address"]
    if not re.fullmatch(r"[\w.-]+|\[?[0-9a-fA-F]*(:[0-9a-fA-F.]*){2,}(%\w+)?\]?", host):
        raise FlagError("--data-parallel-address", f"{host!r} is no host: give a name or an address, without the port")
    return host


def _agreed(raw: Mapping[str, Any], dests: tuple[str, ...]) -> int | None:
    """The one size that was asked for."""
    asked = {dest: size for dest in dests if (size := _positive(raw, dest)) is not None}
    if len(set(asked.values())) > 1:
        (first, size), (other, another) = next(
            ((a, b) for a in asked.items() for b in asked.items() if a[1] != b[1]),
        )
        raise FlagError(_flag(other), f"{another}: layers of all kinds are split alike, and {_flag(first)} is {size}")
    return next(iter(asked.values()), None)


def _positive(raw: Mapping[str, Any], dest: str) -> int | None:
    value = raw[dest]
    if value is None:
        return None
    if not 1 <= value <= (_MOST_RANKS if "seconds" not in dest else 10**6):
        raise FlagError(_flag(dest), f"{value} is not a number from 1 on")
    return int(value)


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _made_of(tensor: int, data: int, nodes: int) -> str:
    return f"--tensor-parallel-size {tensor}, --data-parallel-size {data} and --nnodes {nodes}"
