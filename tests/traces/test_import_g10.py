"""The G10 importer: exact against the artifact's own figures, and clear about malformed files."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teraio.errors import InputError
from teraio.traces import inactive_periods
from teraio.traces.importers.g10 import import_g10

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "g10" / "derived"
CLOCK_HZ = 1_200_000_000


def summary_rows() -> list[dict[str, str]]:
    """One row per published trace; empty where the data is absent."""
    file = DATA / "summary.csv"
    return list(csv.DictReader(file.read_text().splitlines())) if file.is_file() else []


@pytest.mark.skipif(not summary_rows(), reason=f"no G10 traces at {DATA}")
@pytest.mark.parametrize("row", summary_rows(), ids=lambda r: f"{r['model']}-{r['batch']}")
def test_published_traces_match_their_summary_exactly(row: dict[str, str]) -> None:
    """Kernels, tensors, inactive periods, peak live bytes and ideal cycles, without tolerance."""
    trace = import_g10(DATA / f"{row['model']}-{row['batch']}.json.gz")
    periods = inactive_periods(trace)
    weights = trace.is_persistent
    assert trace.num_kernels == int(row["kernels"])
    assert len(trace.storages) == int(row["tensors"])
    assert int(trace.storages.nbytes.sum()) == int(row["total_bytes"])
    assert int(trace.storages.nbytes[weights].sum()) == int(row["weight_bytes"])
    assert int((~periods.is_tail).sum()) == int(row["inactive_intervals"])
    assert trace.peak_live_bytes == int(row["peak_live_bytes"])
    assert round(trace.ideal_seconds * CLOCK_HZ) == int(row["ideal_cycles"])


def small_file() -> dict[str, Any]:
    """Load, one convolution with scratch memory, loss, and its backward with a weight update."""
    return {
        "model": "tiny",
        "batch": 2,
        "clock_hz": CLOCK_HZ,
        "tensors": [
            [0, 4096, 0, 0, 4],  # input, read by the weight's gradient
            [1, 8192, 1, 0, 5],  # weight
            [2, 12288, 0, 1, 3],  # activation, read by the loss
            [3, 4096, 0, 2, 4],  # gradient of the activation
            [4, 8192, 0, 3, 5],  # gradient of the weight
            [5, 16384, 0, 1, -1],  # scratch
        ],
        "kernels": [
            [0, "LoadData_A0", 1.0, 9.0, 9.0, [], [0], -1],
            [1, "Conv2d_Forward", 2.0000009, 9.0, 9.0, [0, 1], [2, 5], 5],
            [2, "makeLoss", 0.5, 9.0, 9.0, [2], [3], -1],
            [3, "Conv2d_Backward_Weight", 2.0, 9.0, 9.0, [0, 3], [4], -1],
            [4, "Conv2d_Apply_Grad", 0.25, 9.0, 9.0, [1, 4], [1], -1],
        ],
    }


def write(path: Path, data: object) -> Path:
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return path


def test_small_file_is_read_completely(tmp_path: Path) -> None:
    """Lifetimes, kinds, phases, accesses and truncated cycles of a file made by hand."""
    trace = import_g10(write(tmp_path / "tiny.json.gz", small_file()))
    storages = trace.storages
    assert storages.birth.tolist() == [0, -1, 1, 2, 3, 1]
    assert storages.death.tolist() == [3, -1, 2, 3, 4, 1]
    assert storages.birth_ordinal.tolist() == [0, -1, 0, 0, 0, 1]
    kinds = ["input", "parameter", "temporary", "temporary", "gradient", "temporary"]
    assert storages.kind.tolist() == kinds
    assert trace.kernels.phase.tolist() == ["forward"] * 3 + ["backward"] * 2
    update = trace.accesses.kernel == 4
    assert trace.accesses.storage[update].tolist() == [1, 4]
    assert trace.accesses.writes[update].tolist() == [True, False]
    assert trace.kernels.duration_seconds[1] == 2_400_001 / CLOCK_HZ
    # At kernel 1: input 4096 + weight 8192 + activation 12288 + scratch 16384.
    assert trace.peak_live_bytes == 40_960
    assert trace.metadata.source == "imported"
    assert len(np.unique(trace.kernels.signature)) == 5


def test_activation_is_what_lives_past_the_loss(tmp_path: Path) -> None:
    """A forward result that backward reads is an activation."""
    data = small_file()
    data["tensors"][2][4] = 4
    data["kernels"][3][5] = [0, 2, 3]
    trace = import_g10(write(tmp_path / "tiny.json.gz", data))
    assert trace.storages.kind[2] == "activation"


def drop(data: dict[str, Any], *path: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    del data[path[-1]]


def put(data: dict[str, Any], value: Any, *path: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: drop(d, "clock_hz"), "clock_hz must be a positive integer"),
        (lambda d: drop(d, "tensors"), "tensors is missing"),
        (lambda d: put(d, [0, 1], "tensors", 0), "tensors, row 0: expected"),
        (lambda d: put(d, 7, "kernels", 1, 0), "kernels, row 1: ids must run"),
        (lambda d: put(d, -5, "tensors", 2, 1), "tensors, row 2: bytes"),
        (lambda d: put(d, 2, "tensors", 2, 2), "tensors, row 2: is_weight"),
        (lambda d: put(d, 1, "tensors", 2, 4), "tensors, row 2: dies at 1"),
        (lambda d: put(d, "x", "tensors", 2, 3), "tensors, row 2: birth and death"),
        (lambda d: put(d, float("nan"), "kernels", 3, 2), "kernels, row 3: exec_ms"),
        (lambda d: put(d, 3, "kernels", 3, 5), "kernels, row 3: inputs"),
        (lambda d: put(d, [99], "kernels", 3, 6), "kernels, row 3: there is no tensor 99"),
        (lambda d: put(d, 4, "kernels", 1, 7), "kernels, row 1: workspace tensor 4"),
        (lambda d: put(d, "loss", "kernels", 2, 1), "makeLoss exactly once"),
        (lambda d: put(d, [2], "kernels", 4, 5), "access outside the storage's lifetime"),
    ],
)
def test_malformed_files_are_refused_by_row(tmp_path: Path, change: Any, message: str) -> None:
    """Each error names the file, the row and what is wrong."""
    data = small_file()
    change(data)
    file = write(tmp_path / "tiny.json.gz", data)
    with pytest.raises(InputError, match=message) as caught:
        import_g10(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", gzip.compress(b"{"), gzip.compress(b"[]")],
    ids=["empty", "not gzip", "cut off JSON", "a list"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    """Empty, plain and truncated files, and JSON of another shape."""
    file = tmp_path / "tiny.json.gz"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"tiny\.json\.gz"):
        import_g10(file)


def test_truncated_gzip_and_missing_file_are_refused(tmp_path: Path) -> None:
    """A copy that broke off, and a path that does not exist."""
    file = write(tmp_path / "tiny.json.gz", small_file())
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match="not a gzipped JSON file"):
        import_g10(file)
    with pytest.raises(InputError, match=r"absent\.json\.gz"):
        import_g10(tmp_path / "absent.json.gz")
