# SPDX-License-Identifier: MIT
"""Root-mean-square normalisation, alone or fused with the residual addition."""
