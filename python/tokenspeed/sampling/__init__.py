# SPDX-License-Identifier: MIT
"""From logits to tokens, with each request's parameters kept on the device by slot."""

from tokenspeed.sampling.chosen import chosen_logprobs
from tokenspeed.sampling.custom import ProcessorError, load_processor
from tokenspeed.sampling.rules import COSTLY_GRAMMAR, NUMERICAL_ERROR, RowFailure
from tokenspeed.sampling.sampler import SampleOutput, Sampler, SamplerConfig

__all__ = [
    "COSTLY_GRAMMAR",
    "NUMERICAL_ERROR",
    "ProcessorError",
    "RowFailure",
    "SampleOutput",
    "Sampler",
    "SamplerConfig",
    "chosen_logprobs",
    "load_processor",
]
