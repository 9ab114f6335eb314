# SPDX-License-Identifier: MIT
"""`python -m tokenspeed_kernel.bench`: a line a solution and workload, beside torch and the measured ceiling."""

import sys

from tokenspeed_kernel.bench.driver import main

sys.exit(main(sys.argv[1:]))
