"""Two sequences of kernels side by side; operators are letters."""

from __future__ import annotations

import random

import pytest

from teraio.executor.alignment import Block, differing_blocks, find_beginning, paired_sections


def blocks_of(planned: str, run: str) -> list[tuple[str, str]]:
    """What stands for what."""
    whole = Block(0, len(planned), 0, len(run))
    blocks = differing_blocks(list(planned), list(run), whole)
    return [(planned[b[0] : b[1]], run[b[2] : b[3]]) for b in blocks]


@pytest.mark.parametrize(
    ("planned", "run", "expected"),
    [
        ("abcdefgh", "abcdefgh", []),
        ("abcFghij", "abcCghij", [("F", "C")]),
        ("abcFghij", "abcXYZghij", [("F", "XYZ")]),
        ("abcXYZghij", "abcFghij", [("XYZ", "F")]),
        ("abcghij", "abcXghij", [("", "X")]),
        ("abcXghij", "abcghij", [("X", "")]),
        ("XYabcdef", "abcdef", [("XY", "")]),
        ("abcdefX", "abcdefYZ", [("X", "YZ")]),
        ("abcd", "", [("abcd", "")]),
        # Two others with less than a window between them.
        ("abcFgGhijk", "abcCgDhijk", [("F", "C"), ("G", "D")]),
        # The same layer again and again, each with another kernel in the middle.
        ("abFcd" * 5, "abCcd" * 5, [("F", "C")] * 5),
        ("abFcd" * 5, "abXYZcd" * 5, [("F", "XYZ")] * 5),
    ],
)
def test_blocks(planned: str, run: str, expected: list[tuple[str, str]]) -> None:
    assert blocks_of(planned, run) == expected


def test_what_is_between_the_blocks_is_the_same() -> None:
    """Random edits: the blocks and what lies between them make up both sequences."""
    choice = random.Random(0)
    for _ in range(50):
        planned = [choice.randrange(20) for _ in range(300)]
        run = list(planned)
        for _ in range(choice.randrange(12)):
            place = choice.randrange(len(run) - 8)
            others = [100 + choice.randrange(3) for _ in range(choice.randrange(6))]
            run[place : place + choice.randrange(6)] = others
        rebuilt, before = [], 0
        for block in differing_blocks(planned, run, Block(0, len(planned), 0, len(run))):
            rebuilt += planned[before : block.planned_start] + run[block.run_start : block.run_stop]
            before = block.planned_stop
        assert rebuilt + planned[before:] == run


def test_far_apart_all_is_another() -> None:
    """No place ahead from which both go the same way: the rest is one block."""
    assert blocks_of("abcd" + "x" * 200 + "efgh", "abcd" + "y" * 300 + "efgh") == [
        ("x" * 200 + "efgh", "y" * 300 + "efgh")
    ]


def test_sections() -> None:
    """Passes, what lies between, optimizers; one section if the two do not pair up."""
    letters = {"f": "forward", "b": "backward", "o": "optimizer", "x": "other"}
    planned = [letters[c] for c in "ffbbxxoofbo"]
    run = [letters[c] for c in "xfbboofbxo"]
    kinds = [(s.kind, s.whole) for s in paired_sections(planned, run)]
    assert kinds == [
        ("pass", (0, 4, 0, 4)),
        ("between", (4, 6, 4, 4)),
        ("optimizer", (6, 8, 4, 6)),
        ("pass", (8, 10, 6, 8)),
        ("between", (10, 10, 8, 9)),
        ("optimizer", (10, 11, 9, 10)),
    ]
    assert paired_sections(planned, planned[:8]) == [("pass", (0, 11, 0, 8))]


def test_the_beginning_among_anything() -> None:
    """Model initialisation before the first iteration, whose first kernels are others."""
    planned, run = list("abcdefghijklmnop"), list("zzzzzabzzABcdefghijklmnop")
    assert find_beginning(planned, run, Block(0, len(planned), 0, len(run))) == 11
    assert find_beginning(planned, list("z" * 30), Block(0, len(planned), 0, 30)) == 0
