"""Sizes and rates as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teraio.errors import InputError
from teraio.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    to_picoseconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("94GB", 94 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80gib", 80 * 2**30),
        (" 1.5 kB ", 1500),
        (".5 MB", 500_000),
        ("1e3", 1000),
        ("1e3kB", 10**6),
        ("512", 512),
        ("7 B", 7),
        ("2TiB", 2 * 2**40),
        ("1PB", 10**15),
        (123, 123),
        (1.6, 2),
        (0, 0),
    ],
)
def test_sizes_are_read(text: str | float, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("num_bytes", [2**53 + 1, 2**62 + 1])
def test_a_whole_number_of_bytes_stays_exact(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == num_bytes
    assert parse_bytes(str(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    "value",
    ["", "GB", "94 GX", "94GB/s", "-1GB", "1,5GB", "nan", "1e400", -1, float("inf"), True, None],
)
def test_what_is_no_size_is_refused_by_name(value: object) -> None:
    with pytest.raises(InputError, match=r"^host_memory: ") as caught:
        parse_bytes(value, "host_memory")  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["16GB/s", "16 GB / s", "16GB", 16e9, 16 * 10**9])
def test_rates_are_read(text: str | float) -> None:
    assert parse_rate(text) == 16e9


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1.5e9, "1.50 GB"),
        (94e9, "94.0 GB"),
        (512e9, "512 GB"),
        (999_499, "999 kB"),
        (999_999, "1.00 MB"),
        (2e15, "2000 TB"),
        (-1.5e9, "-1.50 GB"),
    ],
)
def test_sizes_are_written_with_three_digits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_rates_and_times_are_written() -> None:
    assert format_rate(16e9) == "16.0 GB/s"
    assert [format_seconds(s) for s in (7.3, 0.0273, 273e-6, 5000.0, 0.0)] == [
        "7.30 s",
        "27.3 ms",
        "273 us",
        "5000 s",
        "0 us",
    ]


@given(st.integers(0, 10**18))
def test_what_is_written_reads_back_within_its_digits(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=6e-3)


def test_the_clock_of_the_simulator_is_whole_picoseconds() -> None:
    assert to_picoseconds(1e-12) == 1
    assert to_picoseconds(2.5) == 2_500_000_000_000
