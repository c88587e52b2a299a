"""What tests of the native kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.cpu import library


@pytest.fixture(params=[] if library.library_path() is None else library.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each that both the build and this processor have, in use while the test runs."""
    before = library.instruction_set()
    library.use_instruction_set(request.param)
    yield request.param
    library.use_instruction_set(before)
