# SPDX-License-Identifier: MIT
"""What the tests of released peers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.peers import write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's tokenizer and configuration, for peers."""
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder)
    return folder
