"""The numbered invariants of ARCHITECTURE.md, and the tests that cite them."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# "invariant 4", "invariants 3 and 4", "Invariants 1, 2 and 7"
CITATION = re.compile(r"\binvariants?\s+(\d+(?:(?:,\s*|\s+and\s+|,\s+and\s+)\d+)*)", re.IGNORECASE)


def cited_in(text: str) -> set[int]:
    return {int(number) for list_ in CITATION.findall(text) for number in re.findall(r"\d+", list_)}


def stated() -> list[int]:
    text = (TESTS.parent / "ARCHITECTURE.md").read_text()
    section = re.split(r"^## ", text.partition("## Invariants")[2], maxsplit=1, flags=re.MULTILINE)
    return [int(number) for number in re.findall(r"^(\d+)\. ", section[0], flags=re.MULTILINE)]


def test_the_invariants_are_numbered_from_1_to_12() -> None:
    assert stated() == list(range(1, 13))


def test_every_invariant_is_cited_by_a_test() -> None:
    places: dict[int, list[str]] = {number: [] for number in stated()}
    for path in sorted(TESTS.rglob("*.py")):
        if path == Path(__file__).resolve() or "harness" in path.name:
            continue
        for number in cited_in(path.read_text()):
            assert number in places, f"{path.name} cites invariant {number}, which does not exist"
            places[number].append(path.name)
    assert [number for number, paths in places.items() if not paths] == [], "cited by no test"


def test_what_counts_as_a_citation() -> None:
    assert cited_in("Invariant 4: all or none") == {4}
    assert cited_in("keeps invariants 1, 2 and 12.") == {1, 2, 12}
    assert cited_in("invariant of 4 ranks; 3 invariants") == set()
