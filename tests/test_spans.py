"""Spans: every rank writes its shard, every rank reads all of it in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import Ranks
from tpspan.memory import PAGE_NBYTES

PAGE = PAGE_NBYTES

CASES: dict[str, dict[str, Any]] = {
    "rows": {"shape": (12, 512 * 1024), "dtype": torch.bfloat16},
    "uneven rows": {"shape": (37, 1031 * 64), "dtype": torch.float32, "cut": "uneven"},
    "small": {"shape": (13, 7), "dtype": torch.float8_e4m3fn},
    "scalar": {"shape": (), "dtype": torch.complex128},
    "no rows": {"shape": (0, 5), "dtype": torch.float32},
    "empty rows": {"shape": (6, 0), "dtype": torch.float32, "cut": "uneven"},
    "one byte": {"shape": (1,), "dtype": torch.bool},
    "striped": {"shape": (48, 256 * 1024), "dtype": torch.float16, "layout": "striped"},
    "striped odd": {"shape": (9, 1000 * 1009), "dtype": torch.uint8, "layout": "striped"},
    "striped wide": {
        "shape": (5, 2 * PAGE // 8 + 3),
        "dtype": torch.int64,
        "layout": "striped",
        "stripe_nbytes": 2 * PAGE,
    },
    "striped empty": {"shape": (0, 3), "dtype": torch.complex64, "layout": "striped"},
    "striped scalar": {"shape": (), "dtype": torch.int64, "layout": "striped"},
}


@pytest.mark.ranks()
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_read_what_each_wrote(ranks: Ranks, case: str) -> None:
    ranks.run("bodies.spans:round_trip", **CASES[case])


@pytest.mark.ranks()
def test_the_table_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    """Invariant 2: offsets, numbers and owners agree; addresses are nobody else's business."""
    tables = ranks.run("bodies.spans:same_table")
    assert all(table == tables[0] for table in tables)


@pytest.mark.ranks()
def test_a_few_bytes_lie_on_a_neighbours_page(ranks: Ranks) -> None:
    foreign = ranks.run("bodies.spans:neighbours_page")
    assert any(foreign) == (ranks.size > 1)


@pytest.mark.ranks()
def test_worlds_inside_the_world(ranks: Ranks) -> None:
    ranks.run("bodies.spans:subset_spans")


@pytest.mark.ranks()
def test_many_spans_at_once_use_memory_again(ranks: Ranks) -> None:
    ranks.run("bodies.spans:many_at_once")


@pytest.mark.ranks(1, 2)
def test_a_span_is_found_by_an_address(ranks: Ranks) -> None:
    ranks.run("bodies.spans:found_by_address")


@pytest.mark.ranks()
def test_tensors_keep_their_span_alive(ranks: Ranks) -> None:
    ranks.run("bodies.spans:tensors_keep_the_span")


@pytest.mark.ranks()
def test_close_is_refused_while_tensors_live(ranks: Ranks) -> None:
    """Invariant 4: refused on one rank, refused on all, and nothing was done."""
    ranks.run("bodies.spans:refuse_to_close", holder=ranks.size - 1)


@pytest.mark.ranks()
def test_force_closes_under_tensors(ranks: Ranks) -> None:
    ranks.run("bodies.spans:force_close")


@pytest.mark.ranks()
def test_a_closed_span_says_so(ranks: Ranks) -> None:
    ranks.run("bodies.spans:closed_everywhere")


@pytest.mark.ranks()
def test_a_span_outlives_its_world_only_to_be_read(ranks: Ranks) -> None:
    ranks.run("bodies.spans:closed_world")


@pytest.mark.ranks()
def test_a_world_closes_its_spans(ranks: Ranks) -> None:
    ranks.run("bodies.spans:closes_with_world")


@pytest.mark.ranks()
def test_leaving_a_with_block_by_an_error(ranks: Ranks) -> None:
    ranks.run("bodies.spans:leaving_with_an_error")


@pytest.mark.ranks()
def test_bad_arguments_are_answered_in_one_sentence(ranks: Ranks) -> None:
    ranks.run("bodies.spans:refused_arguments")
