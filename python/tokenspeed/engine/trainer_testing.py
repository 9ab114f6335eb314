# SPDX-License-Identifier: MIT
"""A trainer for tests, as a program: rank 0 of a process group, made and used as training frameworks do it.

`python -m tokenspeed.engine.trainer_testing PORT WORLD_SIZE NAME`. Lines on stdin are orders: "send FILE" broadcasts
the tensors of a safetensors file by name, "send FILE N" the first N of them and dies, "flat FILE" all at once. Each
line of stdout says that something is done.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

c10d: Any = distributed_c10d


def joined(port: int, world_size: int, name: str) -> Any:
    """A group beside torch's default one, at a TCP address that this process opens."""
    limit = timedelta(seconds=120)
    store, rank, size = next(iter(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=limit)))
    store.set_timeout(limit)
    named = c10d.PrefixStore(name, store)
    gloo = c10d.Backend("gloo")
    group, _ = c10d._new_process_group_helper(size, rank, [], gloo, named, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def main() -> None:
    group = joined(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    print("joined", flush=True)
    for line in sys.stdin:
        order, path, *limit = line.split()
        tensors = load_file(path)
        if order == "flat":
            row = torch.cat([tensors[name].flatten().view(torch.uint8) for name in sorted(tensors)])
            tensors = {"row": row}
        for name in sorted(tensors)[: int(limit[0]) if limit else None]:
            torch.distributed.broadcast(tensors[name], src=0, group=group)
        if limit:
            os._exit(1)
        print("sent", flush=True)


if __name__ == "__main__":
    main()
