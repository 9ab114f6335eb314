# SPDX-License-Identifier: MIT
"""From logits to tokens, with each request's parameters kept on the device by slot."""

from tokenspeed.sampling.custom import ProcessorError, load_processor
from tokenspeed.sampling.sampler import SampleOutput, Sampler, SamplerConfig

__all__ = ["ProcessorError", "SampleOutput", "Sampler", "SamplerConfig", "load_processor"]
