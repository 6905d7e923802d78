"""The account of a plan that relies on paging: what its table of moves does not know."""

from __future__ import annotations

from dataclasses import replace

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.timeline import channel_name
from teraio.simulator import simulate
from teraio.traces.trace import Trace


def with_paged_account(made: Plan, trace: Trace, hardware: Hardware) -> Plan:
    """The plan with the peaks and the bytes written to SSDs, per iteration, that it is simulated
    to have, evictions included.
    """
    paged = simulate(trace, made, hardware, record=False).metadata
    written = {
        ssd: paged.channel_bytes.get(channel_name(ssd, is_write=True), 0)
        for ssd in hardware.ssd_names
    }
    metadata = replace(
        made.metadata,
        peak_gpu_bytes=paged.peak_gpu_bytes,
        peak_host_bytes=paged.peak_host_bytes,
        ssd_bytes_written={ssd: num_bytes for ssd, num_bytes in written.items() if num_bytes},
    )
    return replace(made, metadata=metadata)
