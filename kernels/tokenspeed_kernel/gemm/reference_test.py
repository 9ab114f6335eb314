# SPDX-License-Identifier: MIT
"""Linear and embedding on packed weights equal the same operations on the values that `gguf` reads from them."""

from __future__ import annotations

import gguf
import pytest
import torch

from tokenspeed_kernel.gemm.reference import embedding, linear
from tokenspeed_kernel.numerics.weight_cases import packed_weight
from tokenspeed_kernel.quant.packed import GGUF_FORMATS


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_packed_weight_acts_as_its_values(format: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = packed_weight(generator, format, 12, 512)
    values = torch.from_numpy(gguf.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[format.upper()]))
    x, bias = torch.randn(4, 512, generator=generator), torch.randn(12, generator=generator)
    torch.testing.assert_close(linear(x, weight, bias), torch.nn.functional.linear(x, values, bias))
    ids = torch.tensor([3, 0, 11])
    assert torch.equal(embedding(ids, weight, torch.float32), values[ids])
