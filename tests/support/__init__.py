# SPDX-License-Identifier: MIT
"""What several test folders share: a server on a loopback port, and the reference model."""
