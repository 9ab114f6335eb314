# SPDX-License-Identifier: MIT
"""Writing and copying paged keys and values."""
