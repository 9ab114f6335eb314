# SPDX-License-Identifier: MIT
"""The execution plane: one loop that admits, plans, launches, settles and publishes; and what it is made of."""
