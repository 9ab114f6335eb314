# SPDX-License-Identifier: MIT
"""Inputs of a step made on the device: block tables kept up to date there, and what a decode step derives from them."""
