"""Hardware: what one machine can do. Bytes, bytes per second and seconds throughout.

"Read" is always towards the GPU (a prefetch), "write" away from it (an offload). The duplex rates
hold while both directions of a device are active.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from teraio.contracts.bundle import build_dataclass
from teraio.contracts.output import replacing_file
from teraio.errors import InputError
from teraio.units import parse_bytes, parse_rate

HOST = "host"
"""Name of the host tier, which is also the name of its one device."""

HOST_ALIGNMENT_BYTES = 512
"""Slots in host memory begin at multiples of this: whole blocks of an O_DIRECT transfer."""

SECONDS_PER_YEAR = 365.25 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Transfer rates of a device or link, in bytes per second, and its latency per transfer.

    A duplex rate left out equals the solo rate: the directions do not disturb each other.
    """

    read_rate: float
    write_rate: float
    duplex_read_rate: float = 0.0
    duplex_write_rate: float = 0.0
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        where = self.describe()
        for name in ("read_rate", "write_rate", "duplex_read_rate", "duplex_write_rate"):
            rate = parse_rate(getattr(self, name), f"{where}.{name}")
            solo = name.removeprefix("duplex_")
            if rate == 0 and solo != name:
                rate = getattr(self, solo)
            if rate <= 0:
                raise InputError(f"{where}.{name}: must be above 0 bytes/s, got {rate:g}")
            if solo != name and rate > getattr(self, solo):
                raise InputError(
                    f"{where}.{name}: {rate:g} is above {solo} {getattr(self, solo):g}; "
                    "both directions together cannot speed one up"
                )
            object.__setattr__(self, name, rate)
        _check_number(where, "latency_seconds", self.latency_seconds)

    def describe(self) -> str:
        """How errors name this part of the file."""
        return str(getattr(self, "name", type(self).__name__.lower()))


@dataclass(frozen=True, kw_only=True)
class Link(Rates):
    """A PCIe link (or whatever joins a GPU to the rest); several GPUs may share one."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: ``memory_bytes`` usable by training, and the link that all its transfers cross."""

    name: str
    memory_bytes: int
    link: str
    price_dollars: float | None = None

    def __post_init__(self) -> None:
        _set_bytes(self, f"gpu {self.name}", "memory_bytes")
        _check_number(f"gpu {self.name}", "price_dollars", self.price_dollars)


@dataclass(frozen=True, kw_only=True)
class Host(Rates):
    """The host tier: ``memory_bytes`` is the capacity for offload, bounce buffers included.

    ``memory_rate`` (bytes/s, both directions together) bounds host transfers and, twice, SSD
    transfers that bounce; None means that it never binds. ``numa_nodes`` names each GPU's node.
    """

    memory_bytes: int
    memory_rate: float | None = None
    numa_nodes: tuple[int, ...] = ()
    price_dollars: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_bytes(self, HOST, "memory_bytes")
        if self.memory_rate is not None:
            rate = parse_rate(self.memory_rate, f"{HOST}.memory_rate")
            if rate <= 0:
                raise InputError(f"{HOST}.memory_rate: must be above 0 bytes/s")
            object.__setattr__(self, "memory_rate", rate)
        _set_tuple(self, HOST, "numa_nodes", int)
        _check_number(HOST, "price_dollars", self.price_dollars)


@dataclass(frozen=True, kw_only=True)
class Ssd(Rates):
    """An SSD device: one drive or a stripe set, addressed by the files in ``paths``.

    ``write_rate`` is the sustained one. ``gpus`` lists the indices of the GPUs that reach it
    (empty: all). ``gds`` false: transfers bounce through ``bounce_bytes`` of host memory.
    ``endurance_bytes`` is what may be written over its life (TBW). ``write_budget`` is the bytes
    per second that each GPU may write on average over an iteration (None: no limit).
    """

    name: str
    capacity_bytes: int
    paths: tuple[str, ...] = ()
    preferred_io_bytes: int = 16 * 2**20
    alignment_bytes: int = 4096
    bounce_bytes: int = 64 * 2**20
    gpus: tuple[int, ...] = ()
    gds: bool = False
    endurance_bytes: int | None = None
    write_budget: float | None = None
    price_dollars: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f"ssd {self.name}"
        for name in ("capacity_bytes", "preferred_io_bytes", "alignment_bytes", "bounce_bytes"):
            _set_bytes(self, where, name)
        if self.endurance_bytes is not None:
            _set_bytes(self, where, "endurance_bytes")
        if self.write_budget is not None:
            rate = parse_rate(self.write_budget, f"{where}.write_budget")
            object.__setattr__(self, "write_budget", rate)
        if self.alignment_bytes < 1 or self.alignment_bytes & (self.alignment_bytes - 1):
            raise InputError(f"{where}.alignment_bytes: must be a power of two")
        _set_tuple(self, where, "paths", str)
        _set_tuple(self, where, "gpus", int)
        _check_number(where, "price_dollars", self.price_dollars)


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Factors by which kernels take longer while transfers read, write, or do both."""

    read: float = 1.0
    write: float = 1.0
    both: float = 1.0

    def __post_init__(self) -> None:
        for name in ("read", "write", "both"):
            value = getattr(self, name)
            _check_number("slowdown", name, value)
            if value < 1:
                raise InputError(f"slowdown.{name}: a factor of at least 1, got {value:g}")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One node: its GPUs and links, its host memory, its SSDs. Lists are in the file's order.

    ``server_price_dollars`` is the price of what is no other part: chassis, board, processors.
    """

    name: str
    gpu: tuple[Gpu, ...]
    link: tuple[Link, ...]
    host: Host
    ssd: tuple[Ssd, ...] = ()
    slowdown: Slowdown = field(default_factory=Slowdown)
    server_price_dollars: float | None = None

    def __post_init__(self) -> None:
        if not self.gpu:
            raise InputError("hardware: needs at least one [[gpu]]")
        for kind, items in (("gpu", self.gpu), ("link", self.link), ("ssd", self.ssd)):
            object.__setattr__(self, kind, tuple(items))
        links = {link.name for link in self.link}
        for gpu in self.gpu:
            if gpu.link not in links:
                raise InputError(f"gpu {gpu.name}.link: there is no [[link]] named {gpu.link!r}")
        for kind, names in (("link", [x.name for x in self.link]), ("ssd", self.ssd_names)):
            if len(set(names)) < len(names):
                raise InputError(f"{kind}.name: {names} are not distinct")
        if HOST in self.ssd_names or "gpu" in self.ssd_names:
            raise InputError("ssd.name: 'host' and 'gpu' are taken by the tiers")
        for ssd in self.ssd:
            if any(not 0 <= index < len(self.gpu) for index in ssd.gpus):
                raise InputError(f"ssd {ssd.name}.gpus: {list(ssd.gpus)} has no such gpu index")
        _check_number("hardware", "server_price_dollars", self.server_price_dollars)

    @property
    def ssd_names(self) -> list[str]:
        """Names of the SSD devices, in the file's order."""
        return [ssd.name for ssd in self.ssd]

    def gpu_of_rank(self, rank: int) -> Gpu:
        """The GPU that a rank drives: ranks go round the node's GPUs."""
        return self.gpu[rank % len(self.gpu)]

    def link_of_rank(self, rank: int) -> Link:
        """The link that a rank's transfers cross."""
        name = self.gpu_of_rank(rank).link
        return next(link for link in self.link if link.name == name)

    def ssds_of_rank(self, rank: int) -> tuple[Ssd, ...]:
        """The SSDs that a rank's GPU reaches."""
        index = rank % len(self.gpu)
        return tuple(ssd for ssd in self.ssd if not ssd.gpus or index in ssd.gpus)

    @property
    def price_dollars(self) -> float | None:
        """Price of the whole node: the sum of its parts; None if that of any part is unknown."""
        prices = [gpu.price_dollars for gpu in self.gpu] + [ssd.price_dollars for ssd in self.ssd]
        prices += [self.host.price_dollars, self.server_price_dollars]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def num_gpus_of_ssd(self, ssd: Ssd) -> int:
        """How many GPUs reach an SSD, and share what may be written to it."""
        return len(set(ssd.gpus)) or len(self.gpu)

    def write_budgets(self, rank: int) -> dict[str, float]:
        """Bytes per second that a rank may write on average, by name of SSD; only those limited."""
        return {
            ssd.name: ssd.write_budget
            for ssd in self.ssds_of_rank(rank)
            if ssd.write_budget is not None
        }

    def alignment_bytes(self, device: str) -> int:
        """Slots on ``device`` (``host`` or an SSD's name) begin and end at multiples of this."""
        if device == HOST:
            return HOST_ALIGNMENT_BYTES
        return next(ssd.alignment_bytes for ssd in self.ssd if ssd.name == device)

    def with_budgets(
        self,
        gpu_memory: int | str | None = None,
        host_memory: int | str | None = None,
        ssd_years: float | None = None,
    ) -> Hardware:
        """The same machine with the user's budgets in place of its capacities (None keeps them).

        ``ssd_years`` is how long every SSD is to last under training without a pause: it may be
        written at endurance / years, in equal shares by the GPUs that reach it. Raises InputError
        that names an SSD whose endurance is unknown.
        """
        gpus, host, ssds = self.gpu, self.host, self.ssd
        if gpu_memory is not None:
            budget_bytes = parse_bytes(gpu_memory, "gpu_memory")
            gpus = tuple(replace(gpu, memory_bytes=budget_bytes) for gpu in gpus)
        if host_memory is not None:
            host = replace(host, memory_bytes=parse_bytes(host_memory, "host_memory"))
        if ssd_years is not None:
            _check_number("budgets", "ssd_years", ssd_years)
            if ssd_years <= 0:
                raise InputError(f"ssd_years: must be above 0 years, got {ssd_years:g}")
            ssds = tuple(self._lasting(ssd, ssd_years) for ssd in ssds)
        return replace(self, gpu=gpus, host=host, ssd=ssds)

    def _lasting(self, ssd: Ssd, years: float) -> Ssd:
        if ssd.endurance_bytes is None:
            raise InputError(
                f"ssd_years: the endurance of ssd {ssd.name} is unknown; give endurance_bytes (its "
                "TBW) in the hardware file"
            )
        seconds = years * SECONDS_PER_YEAR
        budget = ssd.endurance_bytes / seconds / self.num_gpus_of_ssd(ssd)
        return replace(ssd, write_budget=budget)

    def content_hash(self) -> str:
        """SHA-256 of everything that this value holds."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()

    def to_toml(self) -> str:
        """The file's text; ``from_toml`` gives an equal value."""
        import tomli_w

        return "# teraio hardware\n" + tomli_w.dumps(_without_none(asdict(self)))

    @classmethod
    def from_toml(cls, text: str, file: str = "hardware") -> Hardware:
        """Parse and validate. Raises InputError that names ``file`` and the field."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{file}: not readable as TOML ({error})") from None
        try:
            return cls._from_dict(data)
        except InputError as error:
            raise InputError(f"{file}: {error}") from None

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Hardware:
        parts: dict[str, Any] = dict(data)
        kinds: dict[str, type[Any]] = {"gpu": Gpu, "link": Link, "ssd": Ssd}
        for kind, part_class in kinds.items():
            items = parts.get(kind, [])
            if not isinstance(items, list):
                raise InputError(f"{kind}: must be a list, written [[{kind}]]")
            parts[kind] = tuple(
                build_dataclass(part_class, item, f"{kind} {i}") for i, item in enumerate(items)
            )
        if "host" in parts:
            parts["host"] = build_dataclass(Host, parts["host"], "host")
        if "slowdown" in parts:
            parts["slowdown"] = build_dataclass(Slowdown, parts["slowdown"], "slowdown")
        return build_dataclass(cls, parts, "hardware")

    def save(self, path: str | Path) -> None:
        """Write the TOML file, atomically."""
        with replacing_file(Path(path)) as temporary:
            temporary.write_text(self.to_toml())

    @classmethod
    def load(cls, path_or_preset: str | Path) -> Hardware:
        """Read a file, or take a preset by its name; a file of that name comes first."""
        from teraio.contracts.presets import PRESETS

        path = Path(path_or_preset)
        if path.is_file():
            try:
                return cls.from_toml(path.read_text(), str(path))
            except UnicodeDecodeError:
                raise InputError(f"{path}: not a text file") from None
        if str(path_or_preset) in PRESETS:
            return cls.preset(str(path_or_preset))
        raise InputError(
            f"{path_or_preset}: neither a hardware file nor one of the presets {sorted(PRESETS)}"
        )

    @classmethod
    def preset(cls, name: str) -> Hardware:
        """A machine that comes with teraio: paper, g10, h200, cpu, ... Raises InputError."""
        from teraio.contracts.presets import PRESETS

        build: Callable[[], Hardware] | None = PRESETS.get(name)
        if build is None:
            raise InputError(f"hardware preset {name!r} is not one of {sorted(PRESETS)}")
        return build()


def as_hardware(hardware: Hardware | str | Path) -> Hardware:
    """The value itself, or what a file or preset name stands for."""
    return hardware if isinstance(hardware, Hardware) else Hardware.load(hardware)


def _check_number(where: str, name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}.{name}: expected a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{where}.{name}: must be finite and not negative, got {value!r}")


def _set_bytes(part: Any, where: str, name: str) -> None:
    object.__setattr__(part, name, parse_bytes(getattr(part, name), f"{where}.{name}"))


def _set_tuple(part: Any, where: str, name: str, kind: type) -> None:
    items = getattr(part, name)
    if not isinstance(items, (list, tuple)) or any(type(item) is not kind for item in items):
        raise InputError(f"{where}.{name}: must be a list of {kind.__name__}, got {items!r}")
    object.__setattr__(part, name, tuple(items))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(v) for v in value]
    return value
