# SPDX-License-Identifier: MIT
"""TokenSpeed's kernel library: every tensor operation the models use, for CPUs and GPUs.

`api` is what models call. `registry` picks, for each call's device, dtype and traits, one of the solutions that
the family folders (`attention`, `gemm`, `norm`, ...) register. `numerics` holds every solution against its
family's `reference.py`. Nothing here knows about requests, schedulers or models.
"""
