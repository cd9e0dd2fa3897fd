"""Settings of the model tests."""

from __future__ import annotations

import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="package")
def quiet_and_small():
    """No progress bars, and one thread: the models are too small to share."""
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
