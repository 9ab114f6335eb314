# SPDX-License-Identifier: MIT
"""CPU linear layers and embeddings at every instruction set: exact weights, sums that no batch mate changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.gemm.cpu_linear import linear
from tokenspeed_kernel.numerics.cpu_isa import at_level, isa_levels, with_threads
from tokenspeed_kernel.numerics.weight_cases import packed_weight
from tokenspeed_kernel.quant.cpu_prepare import FORMAT_CODES
from tokenspeed_kernel.quant.packed import BLOCK_FORMATS, PackedWeight
from tokenspeed_kernel.quant.reference import dequantize

FORMATS = list(FORMAT_CODES)


@pytest.fixture(params=isa_levels(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_level(request.param) as level:
        yield level


def make(format: str, rows: int, columns: int) -> tuple[api.Weight, torch.Tensor]:
    """A weight to prepare and its float32 values."""
    generator = torch.Generator().manual_seed(rows * columns)
    if format in BLOCK_FORMATS:
        packed = packed_weight(generator, format, rows, columns)
        return packed, dequantize(packed)
    dense = torch.randn(rows, columns, generator=generator).to(getattr(torch, format))
    return dense, dense.float()


def prepared(format: str, rows: int, columns: int) -> tuple[PackedWeight, torch.Tensor]:
    weight, values = make(format, rows, columns)
    ready = api.prepare_weight(weight, "cpu")
    assert isinstance(ready, PackedWeight)
    return ready, values


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 53])
def test_embedding_gives_the_dequantised_rows_bit_for_bit(format: str, rows: int) -> None:
    weight, values = prepared(format, rows, 512)
    ids = torch.randint(0, rows, (9,), generator=torch.Generator().manual_seed(1))
    for wide in (torch.int32, torch.int64):
        assert torch.equal(api.embedding(ids.to(wide), weight, torch.float32), values[ids])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 13])
def test_linear_is_as_close_to_float64_as_float32_can_be(format: str, num_tokens: int) -> None:
    weight, values = prepared(format, 53, 512)
    x = torch.randn(num_tokens, 512, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(53, generator=torch.Generator().manual_seed(3))
    want = x.double() @ values.double().T + bias.double()
    scale = (x.double().abs() @ values.double().abs().T).max()
    assert ((api.linear(x, weight, bias) - want).abs() <= 1e-6 * scale).all()


@pytest.mark.parametrize("columns", [1, 7, 33])
def test_dense_weights_of_any_width_are_taken(columns: int) -> None:
    weight, values = prepared("float32", 20, columns)
    x = torch.randn(6, columns)
    assert torch.allclose(api.linear(x, weight), x @ values.T, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_row_has_the_same_bits_alone_and_in_any_batch_and_on_any_number_of_threads(format: str) -> None:
    weight, _ = prepared(format, 200, 768)
    x = torch.randn(300, 768, generator=torch.Generator().manual_seed(4))
    with with_threads(3):
        whole = api.linear(x, weight)
    for begin, end in ((0, 1), (299, 300), (10, 12), (10, 13), (10, 14), (7, 15), (100, 117), (0, 250)):
        for threads in (1, 2):
            with with_threads(threads):
                assert torch.equal(api.linear(x[begin:end], weight), whole[begin:end]), (begin, end, threads)


def test_strided_rows_give_the_bits_of_contiguous_ones() -> None:
    weight, _ = prepared("q4_1", 48, 64)
    wide = torch.randn(5, 200)
    assert torch.equal(api.linear(wide[:, 10:74], weight), api.linear(wide[:, 10:74].contiguous(), weight))
    turned = torch.randn(64, 5)
    assert torch.equal(api.linear(turned.T, weight), api.linear(turned.T.contiguous(), weight))


def test_no_tokens_give_no_rows() -> None:
    weight, _ = prepared("q8_0", 48, 64)
    assert api.linear(torch.empty(0, 64), weight).shape == (0, 48)
    assert api.embedding(torch.empty(0, dtype=torch.int64), weight, torch.float32).shape == (0, 64)


def test_instruction_sets_with_fused_adds_agree_to_the_bit() -> None:
    weight, _ = prepared("q4_k", 40, 512)
    x = torch.randn(7, 512)
    results = []
    for level in isa_levels():
        if level != "baseline":  # rounds twice in a multiply-add
            with at_level(level):
                results.append(api.linear(x, weight))
    assert all(torch.equal(result, results[0]) for result in results)


def test_wrong_width_is_named() -> None:
    weight, _ = prepared("q4_1", 48, 64)
    with pytest.raises(ValueError, match="x has 65 columns"):
        api.linear(torch.randn(2, 65), weight)


def test_wrong_bias_is_named() -> None:
    weight, _ = prepared("q4_1", 48, 64)
    with pytest.raises(ValueError, match=r"bias must be contiguous float32 \[48\]"):
        linear(torch.randn(2, 64), weight, torch.randn(47))


@pytest.mark.parametrize("bad", [-1, 48])
def test_token_id_outside_the_table_is_named(bad: int) -> None:
    weight, _ = prepared("q4_1", 48, 64)
    with pytest.raises(ValueError, match=rf"token_ids\[1\] is {bad}, must be in \[0, 48\)"):
        api.embedding(torch.tensor([3, bad]), weight, torch.float32)


def test_prepared_weight_is_not_prepared_again() -> None:
    weight, _ = prepared("q4_1", 48, 64)
    with pytest.raises(ValueError, match="already"):
        api.prepare_weight(weight, "cpu")


def test_weight_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[N, K\]"):
        api.prepare_weight(torch.randn(8), "cpu")
