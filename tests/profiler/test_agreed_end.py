"""Ranks of a profiled script end at the same step, whenever each has seen enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from teraio.profiler import agreed_end
from teraio.profiler.agreed_end import AgreedEnd


class FakeStore:
    """A key-value store of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


@pytest.fixture
def steps_until_end(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps at which ranks end that have seen enough after so many; all step in turn."""

    def run(enough: list[int]) -> list[int]:
        store, ends = FakeStore(), [AgreedEnd() for _ in enough]
        monkeypatch.setattr(agreed_end, "_shared_store", lambda: store)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(enough))
        ended: dict[int, int] = {}
        for step in range(1, 20):
            for rank, end in enumerate(ends):
                if rank in ended:
                    continue
                monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
                try:
                    end._stepped()
                    if step >= enough[rank]:
                        end.complete()
                except SystemExit:
                    ended[rank] = step
        return [ended[rank] for rank in range(len(enough))]

    return run


@pytest.mark.parametrize("enough", [[6, 8, 7], [8, 6, 6], [7, 7, 7]])
def test_all_end_after_the_step_in_which_the_last_had_enough(
    enough: list[int], steps_until_end: Any
) -> None:
    assert steps_until_end(enough) == [max(enough) + 1] * 3


def test_a_process_alone_ends_at_once() -> None:
    with AgreedEnd() as end, pytest.raises(SystemExit):
        end.complete()
