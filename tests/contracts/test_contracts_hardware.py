"""Hardware: presets, the file, and every value that it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teraio.contracts.hardware import Hardware, Rates, as_hardware
from teraio.contracts.presets import PRESETS
from teraio.errors import InputError

TEXT = """
name = "box"
[[gpu]]
name = "A"
memory_bytes = "94GB"
link = "pcie"
[[link]]
name = "pcie"
read_rate = "50GB/s"
write_rate = "50GB/s"
[host]
memory_bytes = "512GB"
read_rate = "50GB/s"
write_rate = "40GB/s"
[[ssd]]
name = "raid"
read_rate = "16GB/s"
write_rate = "12GB/s"
duplex_read_rate = "9GB/s"
latency_seconds = 2e-5
capacity_bytes = "8TB"
paths = ["/mnt/raid"]
"""


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_their_file(name: str, tmp_path: Path) -> None:
    hardware = Hardware.preset(name)
    assert hardware.name == name
    assert Hardware.from_toml(hardware.to_toml()) == hardware
    hardware.save(tmp_path / "h.toml")
    loaded = Hardware.load(tmp_path / "h.toml")
    assert loaded == hardware
    assert loaded.content_hash() == hardware.content_hash()


def test_presets_state_the_machines_of_the_papers() -> None:
    paper, node, g10 = (Hardware.preset(name) for name in ("paper", "paper-node", "g10"))
    assert paper.gpu[0].memory_bytes == 94 * 10**9
    assert paper.host.memory_bytes == 512 * 10**9
    assert paper.ssd[0].duplex_write_rate == paper.ssd[0].read_rate == 16e9
    assert paper.ssd[0].latency_seconds == 20e-6
    assert paper.link[0].duplex_read_rate == 50e9
    assert (len(node.gpu), node.host.memory_bytes) == (2, 1024 * 10**9)
    assert [ssd.name for ssd in node.ssds_of_rank(1)] == ["ssd1"]
    assert g10.gpu[0].memory_bytes == 40 * 2**30
    assert (g10.ssd[0].read_rate, g10.link[0].read_rate) == (3.2e9, 15.754e9)
    assert g10.ssd[0].latency_seconds == g10.link[0].latency_seconds == 0


def test_a_file_is_read_with_units_and_defaults() -> None:
    hardware = Hardware.from_toml(TEXT)
    ssd = hardware.ssd[0]
    assert hardware.gpu[0].memory_bytes == 94 * 10**9
    assert (ssd.duplex_read_rate, ssd.duplex_write_rate) == (9e9, 12e9)
    assert ssd.paths == ("/mnt/raid",)
    assert hardware.alignment_bytes("raid") == 4096
    assert hardware.alignment_bytes("host") == 512
    assert hardware.link_of_rank(3).name == "pcie"
    assert not hardware.ssds_of_rank(0)[0].gds


def test_budgets_replace_capacities() -> None:
    hardware = Hardware.from_toml(TEXT).with_budgets(gpu_memory="24GB", host_memory=0)
    assert hardware.gpu[0].memory_bytes == 24 * 10**9
    assert hardware.host.memory_bytes == 0
    assert Hardware.from_toml(TEXT).with_budgets() == Hardware.from_toml(TEXT)


BAD_EDITS = [
    # text, its replacement, what the message says
    ('memory_bytes = "94GB"', 'memory_bytes = "many"', "gpu A.memory_bytes: cannot read 'many'"),
    ('memory_bytes = "94GB"', "memory_bytes = -1", "gpu A.memory_bytes: must be finite"),
    ('memory_bytes = "94GB"\n', "", "gpu 0: field memory_bytes is missing"),
    ('memory_bytes = "94GB"', "memory = 1", "gpu 0: unknown field memory"),
    ('link = "pcie"', 'link = "nvlink"', "there is no [[link]] named 'nvlink'"),
    ('read_rate = "50GB/s"', "read_rate = 0", "pcie.read_rate: must be above 0"),
    ('read_rate = "16GB/s"', "read_rate = nan", "raid.read_rate: must be finite"),
    ('read_rate = "16GB/s"', "read_rate = true", "raid.read_rate: expected a number"),
    ('duplex_read_rate = "9GB/s"', 'duplex_read_rate = "17GB/s"', "both directions together"),
    ("latency_seconds = 2e-5", "latency_seconds = -1", "raid.latency_seconds: must be finite"),
    ("latency_seconds = 2e-5", 'latency_seconds = "1ms"', "raid.latency_seconds: expected a num"),
    ('capacity_bytes = "8TB"', "capacity_bytes = []", "ssd raid.capacity_bytes: expected a num"),
    ('paths = ["/mnt/raid"]', "alignment_bytes = 1000", "alignment_bytes: must be a power of two"),
    ('paths = ["/mnt/raid"]', "gpus = [1]", "ssd raid.gpus: [1] has no such gpu index"),
    ('paths = ["/mnt/raid"]', 'gpus = ["A"]', "ssd raid.gpus: "),
    ('paths = ["/mnt/raid"]', 'paths = "/mnt/raid"', "ssd raid.paths: "),
    ('paths = ["/mnt/raid"]', "paths = [1]", "ssd raid.paths: "),
    ('paths = ["/mnt/raid"]', 'gds = "yes"', "ssd 0.gds: must be"),
    ('name = "raid"', 'name = "host"', "'host' and 'gpu' are taken"),
    ('name = "raid"', "name = 7", "ssd 0.name: "),
    ("[[gpu]]", "[gpu]", "gpu: must be a list, written [[gpu]]"),
    ("[host]", "[[host]]", "host: expected fields of Host"),
    ('name = "box"\n', "", "hardware: field name is missing"),
    ('name = "box"', 'name = "box"\nspeed = 1', "hardware: unknown field speed"),
    ('name = "box"', "name = ", "not readable as TOML"),
    ('name = "box"', 'name = "box"\nslowdown = {read = 0.5}', "slowdown.read: a factor of at l"),
    ('name = "box"', 'name = "box"\nslowdown = 2', "slowdown: expected fields of Slowdown"),
    ('name = "box"', 'name = "box"\nserver_price_dollars = "x"', "server_price_dollars: expected"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD_EDITS, ids=[e[2][:40] for e in BAD_EDITS])
def test_a_wrong_value_is_refused_by_file_and_field(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(InputError) as caught:
        Hardware.from_toml(TEXT.replace(old, new, 1), "box.toml")
    text = str(caught.value)
    assert text.startswith("box.toml: ")
    assert message in text
    assert "\n" not in text


def test_names_of_parts_must_differ() -> None:
    hardware = Hardware.from_toml(TEXT)
    with pytest.raises(InputError, match=r"ssd.name: .* not distinct"):
        replace(hardware, ssd=hardware.ssd * 2)
    with pytest.raises(InputError, match=r"link.name: .* not distinct"):
        replace(hardware, link=hardware.link * 2)
    with pytest.raises(InputError, match="at least one"):
        replace(hardware, gpu=())


def test_rates_alone_are_checked_too() -> None:
    with pytest.raises(InputError, match=r"rates.write_rate: must be above 0"):
        Rates(read_rate=1, write_rate=0)


def test_a_missing_file_is_told_from_a_preset(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(InputError, match="neither a hardware file nor one of the presets"):
        Hardware.load(tmp_path / "none.toml")
    with pytest.raises(InputError, match="preset 'papr' is not one of"):
        Hardware.preset("papr")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"bad.toml: not a text file"):
        Hardware.load(tmp_path / "bad.toml")
    monkeypatch.chdir(tmp_path)
    Hardware.preset("g10").save("paper")
    assert Hardware.load("paper").name == "g10", "a file of that name comes first"
    assert as_hardware("h200").name == "h200"
