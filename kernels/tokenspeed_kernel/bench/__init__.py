# SPDX-License-Identifier: MIT
"""Timing of kernel solutions beside torch's own operation and this machine's measured ceiling, in one run.

`python -m tokenspeed_kernel.bench --device cpu|cuda` prints a line a solution and workload; `workloads` says what is
run, `timing` how it is timed, `gpu_check` builds, checks and times everything on a machine with a GPU.
"""
