"""On-demand paging on the published traces of G10 (MICRO'23), at that paper's machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware
from teraio.simulator import simulate
from teraio.traces.importers.g10 import import_g10
from teraio.traces.trace import Trace

GIB = 2**30

# Model and batch; fraction of ideal of the artifact's own on-demand paging, which evicts in order
# of arrival (its figure 11), and the GiB that crossed the link each way (its traffic table).
PUBLISHED = [
    ("BERT_Base-128", 0.5378, None),
    ("BERT_Base-256", 0.3708, 173.1),
    ("Inceptionv3-1536", 0.2124, 64.3 + 63.2),
    ("ResNet152-1280", 0.2401, 203.8 + 73.5),
]


def published_trace(shared_data: Path, name: str) -> Trace:
    """One of the traces; skips the test where it is absent."""
    file = shared_data / "g10" / "derived" / f"{name}.json.gz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    return import_g10(file)


@pytest.mark.parametrize(("name", "arrival_order", "gib_read"), PUBLISHED)
def test_evicting_the_furthest_beats_evicting_by_arrival(
    shared_data: Path, name: str, arrival_order: float, gib_read: float | None
) -> None:
    """Better than the published figure, with less traffic, and never better than ideal."""
    trace = published_trace(shared_data, name)
    timeline = simulate(trace, None, "g10", record=False)
    metadata = timeline.metadata
    assert metadata.steady
    assert metadata.peak_gpu_bytes <= 40 * GIB
    assert arrival_order < trace.ideal_seconds / timeline.iteration_seconds <= 1 + 1e-12
    if gib_read is not None:
        reads = sum(b for name, b in metadata.channel_bytes.items() if name.endswith("read"))
        assert reads < gib_read * GIB


def test_on_demand_time_is_ideal_plus_transfers(shared_data: Path) -> None:
    """One transfer at a time, none beside a kernel: the iteration is the sum of its parts."""
    trace = published_trace(shared_data, "BERT_Base-256")
    timeline = simulate(trace, None, "g10", record=False)
    moved = timeline.metadata.channel_bytes
    assert moved["ssd read"] == moved["ssd write"] == 0
    link_rate = Hardware.preset("g10").link[0].read_rate
    transfers = (moved["host read"] + moved["host write"]) / link_rate
    assert np.isclose(timeline.iteration_seconds, trace.ideal_seconds + transfers, rtol=1e-9)
    assert timeline.metadata.compute_overlapped_seconds == 0


def test_less_host_memory_sends_evictions_to_the_ssd(shared_data: Path) -> None:
    """With 16 GiB of host memory the rest overflows to the SSD, and takes longer."""
    trace = published_trace(shared_data, "ResNet152-1280")
    roomy = simulate(trace, None, "g10", record=False)
    narrow = simulate(trace, None, "g10", host_memory="16GiB", record=False)
    assert narrow.metadata.peak_host_bytes <= 16 * GIB
    assert narrow.metadata.channel_bytes["ssd write"] > roomy.metadata.channel_bytes["ssd write"]
    assert narrow.iteration_seconds > roomy.iteration_seconds
