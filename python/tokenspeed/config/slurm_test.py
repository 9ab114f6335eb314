# SPDX-License-Identifier: MIT
"""What Slurm's variables say is taken where it is needed, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.config.flags import FlagError, parse_flags
from tokenspeed.config.flags_table import ENGINE_FLAGS
from tokenspeed.config.slurm import first_host, with_slurm

SECOND_OF_TWO = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}


def derived(argv: str, environment: dict[str, str], num_gpus: int = 8) -> tuple[Any, ...]:
    values = with_slurm(parse_flags(argv.split(), ENGINE_FLAGS).values, environment, num_gpus)
    return values["nnodes"], values["node_rank"], values["dist_init_addr"]


def test_more_ranks_than_the_machine_has_gpus_are_spread_over_the_steps_nodes() -> None:
    assert derived("--tp 16", SECOND_OF_TWO) == (2, 1, "gpu07:30034")
    assert derived("--tp 2 --nprocs-per-node 1 --device cpu", SECOND_OF_TWO, 0) == (2, 1, "gpu07:30034")


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        ("--tp 8", SECOND_OF_TWO),
        ("--tp 16", {}),
        ("--tp 16", {**SECOND_OF_TWO, "SLURM_STEP_NUM_NODES": "1"}),
        ("--tp 16 --device cpu", SECOND_OF_TWO),
    ],
)
def test_a_server_that_fits_one_machine_stays_there(argv: str, environment: dict[str, str]) -> None:
    assert derived(argv, environment) == (None, None, None)


def test_flags_go_before_variables() -> None:
    assert derived("--tp 16 --nnodes 2 --dist-init-addr a:1", SECOND_OF_TWO) == (2, None, "a:1")


def test_several_tasks_a_node_are_refused_by_name() -> None:
    with pytest.raises(FlagError, match=r"--nnodes: .*--ntasks-per-node 1"):
        derived("--tp 16", {**SECOND_OF_TWO, "SLURM_STEP_NUM_TASKS": "16"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a1", "a1"), ("a1,b2", "a1"), ("n[3,5-7]", "n3"), ("n[01-04].x,m1", "n01.x"), ("big-n-[010-012]", "big-n-010")],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_list_of_nothing_is_refused() -> None:
    with pytest.raises(FlagError, match="names no machine"):
        first_host("")
