# SPDX-License-Identifier: MIT
"""The engine at the module paths that released programs import. Names only; what they stand for is elsewhere."""
