# SPDX-License-Identifier: MIT
"""HTTP: routes, errors, server-sent events, admission, metrics."""
