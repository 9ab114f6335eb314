# SPDX-License-Identifier: MIT
"""Workers: which one gets a request, retries, health."""
