# SPDX-License-Identifier: MIT
"""The commands `ts` (also `tokenspeed`) and `smg`: they parse, start processes and print; nothing imports them."""
