# SPDX-License-Identifier: MIT
"""OpenAI's Responses and Conversations APIs."""
