"""What a save keeps out of its way."""

from __future__ import annotations

import gc

import pytest

from keepstep.checkpointer import _without_collecting


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_looked_for_within_a_save_and_then_as_before(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(OSError, match="full"), _without_collecting():
            assert not gc.isenabled()
            raise OSError("full")
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
