# SPDX-License-Identifier: MIT
"""Pure machines for text: tokenizer, detokenizer, stop strings, chat templates."""
