"""What all tests share: a cache of compiled kernels that is not the user's, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give workers whole files, so that what the tests of one share is made once."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "load":
        return None  # another way was asked for
    config.option.loadscopereorder = False  # files of few tests, which would be last, take longest
    return LoadFileScheduling(config, log)
