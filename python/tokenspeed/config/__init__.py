# SPDX-License-Identifier: MIT
"""Settings: one frozen dataclass a component, made from flags, hardware and model by pure functions. No torch."""
