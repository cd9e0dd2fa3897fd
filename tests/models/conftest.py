"""Settings of the model tests."""

from __future__ import annotations

import pytest
import transformers


@pytest.fixture(autouse=True, scope="package")
def quiet() -> None:
    """Show no progress bars."""
    transformers.utils.logging.disable_progress_bar()
