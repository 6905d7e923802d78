"""Training through the SSD tier, by every backend: what disks may do, and what comes of it."""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.executor.fake_kvikio import fake_library

import teraio
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError, StoreError
from teraio.executor.stores import gds
from teraio.executor.stores.block_file import BlockFile
from teraio.executor.tiers import open_tiers
from teraio.planner.policies.evict_everything import evict_everything

STEPS = 5
PLANS: list[Plan] = []
"""The plan of all tests here, made by the first."""


@pytest.fixture(params=["file", "striped file", "gds", "striped gds"])
def options(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> dict[str, Any]:
    """Of ``execute``: system calls and kvikio (one of our own), in one file and in three."""
    monkeypatch.setattr(gds, "load_kvikio", lambda **_: fake_library())
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    return {
        "ssd_backend": request.param.split()[-1],
        "ssd_path": folders if "striped" in request.param else folders[0],
    }


@pytest.fixture
def training(loop: Any, train: Any) -> Any:
    """A few layers with AdamW."""
    return loop(train)


@pytest.fixture
def plan(training: Any, machine: Any) -> Plan:
    """All that can leave goes to disk whenever it is idle, in units smaller than a weight."""
    if not PLANS:
        hardware = machine()
        hardware = replace(hardware, ssd=(replace(hardware.ssd[0], preferred_io_bytes=8192),))
        PLANS.append(evict_everything(training.trace(), hardware, tiers="ssd"))
    return PLANS[0]


def test_a_hundred_steps_verified(
    options: dict[str, Any], plan: Plan, training: Any, train: Any
) -> None:
    """Every byte that comes back is the one that left, and memory does not grow with the steps."""
    (losses, _), _ = training.run(100)
    model, optimizer = training.made()
    resident: list[int] = []
    with teraio.execute(plan, model, optimizer, verify_transfers=True, **options) as run:
        for number in range(100):
            assert train(model, optimizer, number) == losses[number]
            if number % 15 == 9:
                resident.append(resident_bytes())
    # A leak grows in every stretch of 15 steps, by a moved storage or more in each step; what the
    # interpreter and the C library take once grows in one of them.
    grown_bytes = [after - before for before, after in pairwise(resident[2:])]
    assert min(grown_bytes) < 15 * 2**13, grown_bytes
    report = run.report
    assert report.evictions == report.demand_fetches == 0
    assert report.verified_reads > 100 * 10
    folders = (
        options["ssd_path"] if isinstance(options["ssd_path"], list) else [options["ssd_path"]]
    )
    assert [use.path for use in report.ssd_files] == [str(folder) for folder in folders]
    moved = report.timeline.metadata.channel_bytes
    for use in report.ssd_files:
        assert use.backend == {"file": "file", "gds": "gds-compat"}[options["ssd_backend"]]
        assert use.write_rate is not None
        assert use.read_rate is not None
    assert sum(use.read_bytes for use in report.ssd_files) >= 90 * moved["disk read"] > 0


def test_a_file_that_is_cut(options: dict[str, Any], plan: Plan, training: Any, train: Any) -> None:
    """The run stops and says so: what was there is lost, and zeros are no substitute for it."""
    (losses, _), _ = training.run(STEPS)
    model, optimizer = training.made()
    seen: list[float] = []

    def run() -> None:
        with teraio.execute(plan, model, optimizer, **options):
            for number in range(STEPS):
                if number == 2:
                    cut_files()
                seen.append(train(model, optimizer, number))

    with pytest.raises(StoreError, match=r"was cut from .* to 4096 bytes by somebody else"):
        run()
    assert seen == losses[:2]
    # Nobody shall take for weights what could not be read.
    assert any(bool(parameter.isnan().any()) for parameter in model.parameters())


def test_a_folder_that_is_removed(
    options: dict[str, Any], plan: Plan, training: Any, train: Any, tmp_path: Path
) -> None:
    """The files have no name that could be deleted; the run goes on."""
    (losses, _), _ = training.run(STEPS)
    model, optimizer = training.made()
    with teraio.execute(plan, model, optimizer, **options):
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        for number in range(STEPS):
            if number == 2:
                shutil.rmtree(tmp_path)
            assert train(model, optimizer, number) == losses[number]


def test_a_disk_that_fails_once(
    options: dict[str, Any], plan: Plan, training: Any, train: Any, monkeypatch: Any
) -> None:
    """An error in the middle of a step names the disk; the same step can be made again."""
    (losses, _), _ = training.run(STEPS)
    model, optimizer = training.made()
    read, to_fail, failures = os.preadv, ["once"], list[str]()

    def failing(*arguments: Any) -> int:
        # Several disks read at the same time; one of them finds the word.
        with suppress(IndexError):
            failures.append(to_fail.pop())
            raise OSError(5, "Input/output error")
        return read(*arguments)

    with teraio.execute(plan, model, optimizer, **options):
        for number in range(STEPS):
            if number == 2:
                monkeypatch.setattr(os, "preadv", failing)
                with pytest.raises(StoreError, match=r"disk in .*: read .*Input/output error"):
                    train(model, optimizer, number)
            assert train(model, optimizer, number) == losses[number]
    assert failures == ["once"]


def test_no_room_for_what_the_plan_does_not_know(
    options: dict[str, Any], plan: Plan, training: Any, train: Any, monkeypatch: Any
) -> None:
    """A disk that is full when more must leave than planned: an error, and on it goes."""
    (losses, _), _ = training.run(STEPS)
    model, optimizer = training.made()
    budget_bytes = 2 * sum(p.numel() * 4 for p in model.parameters())
    bounce_bytes = plan.hardware.ssd[0].bounce_bytes
    held: list[torch.Tensor] = []

    def fill_memory() -> None:
        for _ in range(1000):
            held.append(torch.ones(4096))

    with teraio.execute(
        plan, model, optimizer, host_memory=bounce_bytes, gpu_memory=budget_bytes, **options
    ):
        for number in range(STEPS):
            if number == 2:
                with monkeypatch.context() as patch:
                    patch.setattr(os, "posix_fallocate", refuse_space)
                    with pytest.raises(CapacityError, match=r"disk in .*No space left on device"):
                        fill_memory()
                    held.clear()
            assert train(model, optimizer, number) == losses[number]


def test_other_bytes_than_were_written(
    plan: Plan, training: Any, train: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A disk that loses writes is noticed, with the device, the place and what lay there."""
    (losses, _), _ = training.run(STEPS)
    model, optimizer = training.made()
    seen: list[float] = []

    def run() -> None:
        with teraio.execute(plan, model, optimizer, ssd_path=tmp_path, verify_transfers=True):
            for number in range(STEPS):
                if number == 3:
                    monkeypatch.setattr(BlockFile, "write", lambda *arguments: None)
                seen.append(train(model, optimizer, number))

    message = r"disk: the \d+ bytes read at offset \d+ are not those .*\(.*row \d+.*checksum"
    with pytest.raises(StoreError, match=message):
        run()
    assert seen == losses[:3]


def test_bounce_buffers_that_were_not_planned(machine: Any, tmp_path: Path) -> None:
    """A plan for GPUDirect run without it: they come out of what it leaves of the host budget."""
    hardware = machine()
    disk = replace(hardware.ssd[0], gds=True)
    hardware = replace(hardware, ssd=(disk,))
    for planned_bytes, expected in [(0, 10**8 - disk.bounce_bytes), (9 * 10**7, 9 * 10**7)]:
        tiers = open_tiers(
            hardware,
            0,
            {"disk": 4096, "host": planned_bytes},
            host_memory_bytes=10**8,
            ssd_path=tmp_path,
            device_type="cpu",
            ssd_backend="file",
        )
        assert list(tiers.stores) == ["host", "disk"]
        assert tiers.stores["disk"].pinned_bytes == disk.bounce_bytes
        assert tiers.stores["host"].capacity_bytes == expected
        tiers.close()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def cut_files() -> None:
    """Leave the first block of every nameless file that this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{descriptor}"
        if (
            os.path.islink(link)
            and "(deleted)" in os.readlink(link)
            and "/one" in os.readlink(link)
        ):
            os.truncate(link, 4096)
            found += 1
    assert found > 0


def refuse_space(*arguments: int) -> None:
    """A disk that is full."""
    raise OSError(28, "No space left on device")
