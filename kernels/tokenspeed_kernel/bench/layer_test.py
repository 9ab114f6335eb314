# SPDX-License-Identifier: MIT
"""The benchmark of whole layers: what it refuses, and that a layer is the operations of a decoder in order."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.bench import layer
from tokenspeed_kernel.bench.workloads import Model
from tokenspeed_kernel.registry import current_platform


@pytest.mark.skipif(current_platform().has_device("cuda"), reason="there is a GPU")
def test_machine_without_a_gpu_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert layer.main([]) == 2
    assert capsys.readouterr().err == "error: this machine has no GPU\n"


def test_layer_gives_a_row_a_token_and_changes_with_the_cache() -> None:
    model = Model(64, 4, 2, 16, 96, 100)
    torch.manual_seed(0)
    weights, batch = layer.make_layer(model, "cpu"), layer.make_batch(model, 3, 20, "cpu")
    fresh = batch._replace(residual=batch.residual.clone())
    first = layer.run_layer(model, weights, fresh)
    batch.caches[1][:] = 0
    second = layer.run_layer(model, weights, batch)
    assert first.shape == (3, 64) and bool(first.isfinite().all())
    assert not torch.equal(first, second)
