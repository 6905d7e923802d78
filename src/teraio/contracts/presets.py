"""Machines that come with teraio. ``teraio probe`` measures a real one and replaces them."""

from __future__ import annotations

import os
from collections.abc import Callable

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Slowdown, Ssd

GB = 10**9
GIB = 2**30
TB = 10**12


H100_DOLLARS = 30_000.0
"""Upper end of the 25,000 to 30,000 reported for an H100 (TechSpot, August 2023)."""

SSD_DOLLARS = 289.0
"""A Samsung 990 PRO of 2 TB before its launch (Hardwaresfera, August 2022)."""

HOST_DOLLARS_PER_TB = 4_000.0
NODE_DOLLARS = 6_400.0
"""Of a server with two processors and 1 TB of memory: 10,424 to a large buyer, nearly 40 % of it
the memory (SemiAnalysis, AI Server Cost Analysis, May 2023)."""


def _paper(num_gpus: int, name: str) -> Hardware:
    # The evaluation node of the paper: H100 NVL, PCIe 5, four 990 PRO per GPU in RAID 0. Rates are
    # the paper's, also duplex; prices are not (docs/cost.md): those above, the node's by GPU.
    return Hardware(
        name=name,
        gpu=tuple(
            Gpu(
                name=f"H100 NVL {i}",
                memory_bytes=94 * GB,
                link=f"pcie{i}",
                price_dollars=H100_DOLLARS,
            )
            for i in range(num_gpus)
        ),
        link=tuple(
            Link(name=f"pcie{i}", read_rate=50 * GB, write_rate=50 * GB) for i in range(num_gpus)
        ),
        host=Host(
            memory_bytes=512 * GB * num_gpus,
            read_rate=50 * GB,
            write_rate=50 * GB,
            price_dollars=HOST_DOLLARS_PER_TB / 2 * num_gpus,
        ),
        ssd=tuple(
            Ssd(
                name=f"ssd{i}",
                read_rate=16 * GB,
                write_rate=16 * GB,
                latency_seconds=20e-6,
                capacity_bytes=8 * TB,
                gpus=(i,),
                gds=True,
                endurance_bytes=4 * 1200 * TB,
                price_dollars=4 * SSD_DOLLARS,
            )
            for i in range(num_gpus)
        ),
        server_price_dollars=NODE_DOLLARS / 2 * num_gpus,
    )


def _g10() -> Hardware:
    # Defaults of the G10 artifact (MICRO'23); its transfers arrive without latency.
    return Hardware(
        name="g10",
        gpu=(Gpu(name="A100 40GB", memory_bytes=40 * GIB, link="pcie"),),
        link=(Link(name="pcie", read_rate=15.754e9, write_rate=15.754e9),),
        host=Host(memory_bytes=128 * GIB, read_rate=15.754e9, write_rate=15.754e9),
        ssd=(Ssd(name="ssd", read_rate=3.2e9, write_rate=3.2e9, capacity_bytes=4 * TB, gds=True),),
    )


def _single_gpu(
    name: str, gpu: str, memory_bytes: int, pcie: float, duplex: float
) -> Callable[[], Hardware]:
    def build() -> Hardware:
        return Hardware(
            name=name,
            gpu=(Gpu(name=gpu, memory_bytes=memory_bytes, link="pcie"),),
            link=(
                Link(
                    name="pcie",
                    read_rate=pcie,
                    write_rate=pcie,
                    duplex_read_rate=duplex,
                    duplex_write_rate=duplex,
                    latency_seconds=10e-6,
                ),
            ),
            host=Host(memory_bytes=256 * GB, read_rate=pcie, write_rate=pcie),
            ssd=(
                Ssd(
                    name="ssd",
                    read_rate=min(6.5 * GB, pcie),
                    write_rate=min(5.0 * GB, pcie),
                    duplex_read_rate=min(4.0 * GB, pcie),
                    duplex_write_rate=min(3.5 * GB, pcie),
                    latency_seconds=80e-6,
                    capacity_bytes=2 * TB,
                ),
            ),
        )

    return build


def _cpu() -> Hardware:
    # This machine's memory plays the GPU. Rates are low on purpose: a plan made for them also
    # works on a faster machine. Half of the memory is the GPU's, a quarter the host tier's.
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        name="cpu",
        gpu=(Gpu(name="main memory", memory_bytes=memory_bytes // 2, link="memory"),),
        link=(
            Link(
                name="memory",
                read_rate=4 * GB,
                write_rate=4 * GB,
                duplex_read_rate=2 * GB,
                duplex_write_rate=2 * GB,
                latency_seconds=20e-6,
            ),
        ),
        host=Host(memory_bytes=memory_bytes // 4, read_rate=4 * GB, write_rate=4 * GB),
        ssd=(
            Ssd(
                name="disk",
                read_rate=0.4 * GB,
                write_rate=0.4 * GB,
                duplex_read_rate=0.2 * GB,
                duplex_write_rate=0.2 * GB,
                latency_seconds=200e-6,
                capacity_bytes=16 * GB,
            ),
        ),
        slowdown=Slowdown(read=1.05, write=1.05, both=1.1),
    )


PRESETS: dict[str, Callable[[], Hardware]] = {
    "paper": lambda: _paper(1, "paper"),
    "paper-node": lambda: _paper(2, "paper-node"),
    "g10": _g10,
    "h100": _single_gpu("h100", "H100 SXM", 80 * GIB, 55 * GB, 49 * GB),
    "h200": _single_gpu("h200", "H200", 141 * GB, 55 * GB, 49 * GB),
    "a100-80": _single_gpu("a100-80", "A100 80GB", 80 * GIB, 25 * GB, 22 * GB),
    "rtx4090": _single_gpu("rtx4090", "RTX 4090", 24 * GIB, 25 * GB, 22 * GB),
    "cpu": _cpu,
}
