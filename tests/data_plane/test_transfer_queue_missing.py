"""The client without the TransferQueue package."""

import sys

import pytest

from asyncrl.data_plane.transfer_queue import TransferQueueClient
from asyncrl.errors import ConfigError


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transfer_queue", None)  # makes Python raise ImportError for this module

    with pytest.raises(ConfigError, match=r"asyncrl\[transfer-queue\].*object_store"):
        TransferQueueClient(namespace="run", timeout_s=1.0)
