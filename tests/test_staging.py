"""Reading shared weights in place or staged: policy, chunks, order, layers and whole models."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Ranks
from tpspan.parallel import chunks, rates
from tpspan.parallel.chunks import Piece, copy_order, plan_chunks
from tpspan.parallel.order import Order
from tpspan.parallel.policy import LINKED, LOCAL, Product, Rates, choose
from tpspan.spans.layout import Layout
from tpspan.spans.reads import check_read

PAGE = 2 << 20
# The collective steps differ from launcher to launcher only in the control plane below.
ALL = pytest.mark.ranks(1, 2, 3, launchers=("mpirun",))
FEW = pytest.mark.ranks(1, 4, launchers=("mpirun",))
PAIR = pytest.mark.ranks(2, launchers=("mpirun",))
READS = pytest.mark.parametrize("read", ["in_place", "staged"])

# ---------------------------------------------------------------- policy


def weight(rows: int, ranks: int, out_features: int) -> Product:
    nbytes = out_features * 8192 * 2
    return Product(rows, out_features, 8192, 2, nbytes * (ranks - 1) // ranks)


@pytest.mark.parametrize(("world_size", "out_features"), [(2, 14336), (4, 28672)])
def test_many_rows_are_staged_and_few_are_not(world_size: int, out_features: int) -> None:
    """As measured between H200 GPUs; the default rates give the same answers."""
    answers = [
        choose("auto", weight(m, world_size, out_features), LINKED) for m in (1, 64, 1024, 4096)
    ]
    assert answers == ["in_place", "in_place", "staged", "staged"]


def test_what_is_local_is_never_copied() -> None:
    for rows in (1, 10, 1000, 100_000):
        assert choose("auto", weight(rows, 4, 1000), LOCAL) == "in_place"


def test_the_given_policy_holds_where_there_is_something_to_copy() -> None:
    product = weight(1, 2, 1000)
    assert choose("staged", product, None) == "staged"
    assert choose("in_place", product, LINKED) == "in_place"
    assert choose("staged", Product(0, 8, 8, 4, 128), None) == "in_place"
    assert choose("staged", Product(8, 8, 8, 4, 0), None) == "in_place"
    assert choose("auto", Product(8, 8, 8, 4, 128), LINKED) == "in_place"
    with pytest.raises(ValueError, match="'auto', 'in_place', 'staged'"):
        check_read("never")


@given(
    rows=st.integers(1, 1 << 16),
    out_features=st.integers(1, 1 << 16),
    world_size=st.integers(2, 8),
    numbers=st.tuples(*[st.floats(1e8, 1e13)] * 4, st.floats(1, 1e9), st.floats(0, 1e-3)),
)
def test_auto_takes_what_the_model_says_is_faster(
    rows: int, out_features: int, world_size: int, numbers: tuple[float, ...]
) -> None:
    copy, read, local, flops, served, start = numbers
    known = Rates(copy, read, served, local, flops, overlaps=True, start_s=start)
    product = weight(rows, world_size, out_features)
    if product.nbytes < 1 << 20:
        return
    times = {"in_place": product.in_place_s(known), "staged": product.staged_s(known)}
    assert times[choose("auto", product, known)] == min(times.values())
    assert product.multiply_s(known) <= min(times.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"copy_bytes_per_s": 0.0},
        {"read_bytes_per_s": float("nan")},
        {"flops_per_s": float("inf")},
        {"rows_per_reading": 0.5},
        {"start_s": -1.0},
    ],
)
def test_what_are_no_rates(wrong: dict[str, float]) -> None:
    numbers: dict[str, Any] = {
        "copy_bytes_per_s": 1.0,
        "read_bytes_per_s": 1.0,
        "rows_per_reading": 1.0,
        "local_bytes_per_s": 1.0,
        "flops_per_s": 1.0,
        "overlaps": True,
        "start_s": 0.0,
    }
    Rates(**numbers)
    with pytest.raises(ValueError, match="are no rates"):
        Rates(**{**numbers, **wrong})


# ---------------------------------------------------------------- chunks


def pieces_of(layout: Layout) -> list[Piece]:
    return [Piece(run.offset_bytes, run.nbytes, run.owner) for run in layout.pieces()]


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    row_nbytes=st.sampled_from([1, 4096, 100_000, PAGE, 5_000_001]),
    striped=st.booleans(),
    rows_x=st.sampled_from([1, 1024, 4096]),
    smallest=st.sampled_from([1, PAGE, 8 << 20]),
)
def test_chunks_cover_every_row_once(
    rows: list[int], row_nbytes: int, striped: bool, rows_x: int, smallest: int
) -> None:
    world_size, num_rows = len(rows), sum(rows)
    nbytes = num_rows * row_nbytes
    if striped:
        layout = Layout.striped(nbytes, world_size, stripe_nbytes=PAGE, page_nbytes=PAGE)
    else:
        layout = Layout.blocked([n * row_nbytes for n in rows], page_nbytes=PAGE)
    pieces = pieces_of(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_SMALLEST_CHUNK_NBYTES", smallest)
        plans = [
            plan_chunks(pieces, num_rows, row_nbytes, rank, world_size, rows_x)
            for rank in range(world_size)
        ]
    for rank, plan in enumerate(plans):
        covered = sorted(row for chunk in plan for row in range(chunk.start, chunk.stop))
        assert covered == list(range(num_rows))
        copied = [chunk for chunk in plan if chunk.copies]
        largest = max((chunk.stop - chunk.start for chunk in copied), default=0)
        assert 2 * largest * row_nbytes <= 2 * nbytes, "two buffers are at most two weights"
        for chunk in copied:
            begin, end = chunk.start * row_nbytes, chunk.stop * row_nbytes
            assert sum(piece.nbytes for piece in chunk.copies) == end - begin
            for piece in chunk.copies:
                assert begin <= piece.offset_bytes and piece.end <= end
                owners = {run.owner for run in layout.pieces(piece.offset_bytes, piece.nbytes)}
                assert owners == {piece.owner}, "one copy reads one owner's memory"
        if copied and len(copied) < len(plan):
            assert plan.index(copied[0]) == len(plan) - len(copied), "own rows come first"
            assert rank in {run.owner for run in layout.runs}


def test_ranks_read_from_different_owners_at_any_time() -> None:
    layout = Layout.blocked([64 << 20] * 4, page_nbytes=PAGE)
    plans = [plan_chunks(pieces_of(layout), 4096, 1 << 16, rank, 4, 1) for rank in range(4)]
    first = [[chunk.copies[0].owner for chunk in plan if chunk.copies][:3] for plan in plans]
    assert first == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]
    for plan in plans:
        sizes = [chunk.stop - chunk.start for chunk in plan]
        assert sizes == [1024, 1024, 1024, 512, 256, 128, 128]
    coarse = plan_chunks(pieces_of(layout), 4096, 1 << 16, 0, 4, 4096)
    assert [chunk.stop - chunk.start for chunk in coarse] == [1024, 1024, 1024, 512, 512]


def test_copies_begin_at_the_right_neighbour() -> None:
    layout = Layout.striped(16 * PAGE, 4, stripe_nbytes=PAGE, page_nbytes=PAGE)
    pieces = pieces_of(layout)
    first = [copy_order(pieces, rank, 4)[0].owner for rank in range(4)]
    assert first == [1, 2, 3, 0]
    assert copy_order(pieces[1:2], 1, 4) == pieces[1:2]
    joined = copy_order([Piece(0, 5, 1), Piece(5, 5, 1), Piece(10, 5, 0)], 0, 2)
    assert joined == [Piece(0, 10, 1), Piece(10, 5, 0)]


# ---------------------------------------------------------------- order


def follow(order: Order, uses: str) -> str:
    order.begin()
    found = "".join(str(order.use(use) or "-") for use in uses)
    order.finish()
    return found


def test_the_order_is_learned_and_learned_again() -> None:
    order = Order()
    assert follow(order, "abcd") == "----"
    assert follow(order, "abcd") == "bcd-"
    assert follow(order, "acbd") == "bdc-"  # c comes early: what followed c, then what followed b
    assert follow(order, "acbd") == "cbd-"
    assert follow(order, "aabb") == "ccdd"
    assert follow(order, "aabb") == "abb-"
    assert follow(order, "xaab") == "-abb"
    assert follow(order, "") == ""
    assert follow(order, "xaab") == "aab-"


def test_a_pass_that_breaks_off_teaches_nothing() -> None:
    order = Order()
    follow(order, "abc")
    order.begin()
    order.use("c")
    assert follow(order, "abc") == "bc-"


# ---------------------------------------------------------------- rates on disk


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(rates.CACHE_VARIABLE, raising=False)
    return tmp_path / "tpspan"


def test_rates_are_kept(cache: Path) -> None:
    key = {"device": "a", "ranks": "2"}
    assert rates.load(key) is None
    rates.store(key, LINKED)
    assert rates.load(key) == LINKED
    assert rates.load({**key, "ranks": "3"}) is None
    rates.store({**key, "ranks": "3"}, LOCAL)
    assert rates.load(key) == LINKED
    assert len(list(cache.iterdir())) == 2, "no unfinished file is left"


def test_the_first_of_several_decides_for_all(cache: Path) -> None:
    """Ranks measure at the same time, and each a little differently."""
    key = {"device": "a"}
    measured = [dataclasses.replace(LINKED, start_s=1e-6 * rank) for rank in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as ranks:
        decided = list(ranks.map(lambda mine: rates.store(key, mine), measured))
    assert len(set(decided)) == 1 and decided[0] in measured
    assert rates.store(key, LOCAL) == decided[0] == rates.load(key)
    assert len(list(cache.iterdir())) == 1, "no unfinished file is left"


def test_without_links_rates_are_kept_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise OSError(errno.EPERM, "no links on this file system")

    monkeypatch.setattr(os, "link", refuse)
    assert rates.store({"device": "a"}, LINKED) == LINKED
    assert rates.store({"device": "a"}, LOCAL) == LINKED == rates.load({"device": "a"})


def test_without_a_cache_rates_are_ones_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rates.CACHE_VARIABLE, "0")
    assert rates.store({"device": "a"}, LINKED) == LINKED
    assert rates.store({"device": "a"}, LOCAL) == LOCAL
    assert not cache.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": 2}',
        "\x00",
        '{"schema": 2, "key": {"device": "a"}, "rates": {"copy_bytes_per_s": 1}}',
        '{"schema": 2, "key": {"device": "a"}, "rates": []}',
        '{"schema": 2, "key": {"device": "b"}, "rates": {}}',
    ],
)
def test_a_damaged_file_is_written_again(cache: Path, text: str) -> None:
    key = {"device": "a"}
    rates.store(key, LINKED)
    (path,) = cache.iterdir()
    path.write_text(text)
    assert rates.load(key) is None
    rates.store(key, LOCAL)
    assert rates.load(key) == LOCAL


def test_numbers_that_are_none_are_not_believed(cache: Path) -> None:
    key = {"device": "a"}
    rates.store(key, LINKED)
    (path,) = cache.iterdir()
    found = json.loads(path.read_text())
    for wrong in (-1.0, float("nan"), "fast", None):
        path.write_text(json.dumps({**found, "rates": {**found["rates"], "flops_per_s": wrong}}))
        assert rates.load(key) is None


def test_the_cache_can_be_turned_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rates.CACHE_VARIABLE, "0")
    rates.store({"device": "a"}, LINKED)
    assert not cache.exists()
    assert rates.load({"device": "a"}) is None


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    rates.store({"device": "a"}, LINKED)
    assert rates.load({"device": "a"}) is None


# ---------------------------------------------------------------- layers

CASES: dict[str, dict[str, Any]] = {
    "even rows": {"shape": (32, 65536), "dtype": "float32"},
    "uneven": {"shape": (37, 30000), "dtype": "float64", "cut": "uneven"},
    "striped": {"shape": (64, 65536), "dtype": "bfloat16", "layout": "striped"},
    "striped across rows": {"shape": (7, 300_001), "dtype": "float32", "layout": "striped"},
    "on one page": {"shape": (13, 7), "dtype": "float64"},
    "more ranks than rows": {"shape": (2, 600_000), "dtype": "float32"},
    "no rows": {"shape": (0, 5), "dtype": "float32"},
}


def uneven(total: int, size: int) -> list[int]:
    """The last rank has none, the first has most."""
    if size == 1:
        return [total]
    rest = [max(0, total // size - 3)] * (size - 2)
    return [total - sum(rest), *rest, 0]


@ALL
@READS
@pytest.mark.parametrize("case", CASES)
def test_a_gathered_layer_is_a_linear_layer(ranks: Ranks, case: str, read: str) -> None:
    arguments = dict(CASES[case])
    if arguments.pop("cut", None):
        arguments["rows"] = uneven(arguments["shape"][0], ranks.size)
    counts = ranks.run("bodies.staging:like_linear", read=read, **arguments)
    assert all(in_place + staged > 0 for in_place, staged, _ in counts)
    if read == "in_place" or ranks.size == 1:
        assert all(staged == 0 for _, staged, _ in counts)
    elif case not in ("on one page", "no rows"):
        assert any(staged > 0 for _, staged, _ in counts)


@PAIR
def test_on_one_machine_auto_never_copies(ranks: Ranks) -> None:
    counts = ranks.run("bodies.staging:like_linear", read="auto", **CASES["even rows"])
    if ranks.backend == "host":
        assert all(staged == 0 for _, staged, _ in counts)


@FEW
@pytest.mark.parametrize("layout", ["blocked", "striped"])
@READS
def test_ranks_train_their_rows(ranks: Ranks, read: str, layout: str) -> None:
    ranks.run("bodies.staging:trains_like_linear", read=read, layout=layout)


@PAIR
@READS
def test_autocast_and_differences(ranks: Ranks, read: str) -> None:
    ranks.run("bodies.staging:under_autocast", read=read)
    ranks.run("bodies.staging:agrees_with_differences", read=read)


@FEW
def test_misuse_of_a_layer(ranks: Ranks) -> None:
    ranks.run("bodies.staging:refusals")
    ranks.run("bodies.staging:over_a_given_span")
    ranks.run("bodies.staging:new_values_are_no_copies")


@PAIR
def test_a_buffer_is_written_again_behind_the_product_that_read_it(ranks: Ranks) -> None:
    """Two copies are under way before anything is multiplied, the own rows first."""
    start = ["follow", "copy", "multiply", "copy"]
    again = ["wait", "multiply", "follow", "copy"]
    last = ["wait", "multiply"]
    for log in ranks.run("bodies.staging:order_of_steps"):
        num_copies = log.count("copy")
        assert num_copies >= 4
        assert log == [*start, *again * (num_copies - 2), *last * 2, "join"]


@PAIR
def test_auto_goes_by_rows(ranks: Ranks) -> None:
    expected = [(1, 0), (1, 0), (0, 1), (0, 1)]
    assert ranks.run("bodies.staging:decides_by_rates") == [expected] * 2


# ---------------------------------------------------------------- models


@ALL
@pytest.mark.parametrize("read", ["in_place", "staged", "auto"])
def test_a_model_with_a_policy_is_the_same_model(ranks: Ranks, read: str) -> None:
    for in_place, staged in ranks.run("bodies.staging:model_like_private", read=read):
        if ranks.size == 1 or read == "in_place" or (ranks.backend == "host" and read == "auto"):
            assert staged == 0 and in_place > 0
        elif read == "staged":
            assert staged > 0


@PAIR
def test_the_next_layer_is_brought_ahead(ranks: Ranks) -> None:
    """Once the order is known every weight is copied once; a new order costs what was in vain."""
    for passes in ranks.run("bodies.staging:prefetches"):
        taken = [count for count, _ in passes]
        copied = [count for _, count in passes]
        assert len(set(taken)) == 1
        assert copied[0] == copied[1] == copied[3] == taken[0]
        assert taken[0] <= copied[2] <= 2 * taken[0]


@FEW
def test_weights_change_between_passes(ranks: Ranks) -> None:
    ranks.run("bodies.staging:sees_new_weights")
    ranks.run("bodies.staging:graphs_of_gradients")


@FEW
@READS
def test_ranks_train_what_they_own(ranks: Ranks, read: str) -> None:
    ranks.run("bodies.staging:trains_owned_pieces", read=read)


@PAIR
def test_sparse_gradients_are_refused(ranks: Ranks) -> None:
    ranks.run("bodies.staging:sparse_gradients_are_refused")


# ---------------------------------------------------------------- streams


@pytest.mark.ranks(2, 4, launchers=("mpirun",), backends=("cuda",))
def test_a_buffer_waits_for_the_product_that_reads_it(ranks: Ranks) -> None:
    """And the test sees it if the guard is taken out."""
    assert all(ranks.run("bodies.staging:slow_products"))
    assert not all(ranks.run("bodies.staging:slow_products", guarded=False))


@pytest.mark.ranks(2, 4, launchers=("mpirun",), backends=("cuda",))
@pytest.mark.parametrize("read", ["in_place", "staged", "auto"])
def test_captured_products(ranks: Ranks, read: str) -> None:
    ranks.run("bodies.staging:captured", read=read, num_replays=100)


@pytest.mark.ranks(2, launchers=("mpirun",), backends=("cuda",))
def test_measured_rates_are_plausible(ranks: Ranks) -> None:
    for found in ranks.run("bodies.staging:measured_rates"):
        for name in ("copy_bytes_per_s", "read_bytes_per_s", "local_bytes_per_s"):
            assert 1e9 < found[name] < 1e14, name
        assert found["flops_per_s"] > 1e12
        assert found["rows_per_reading"] >= 1
        assert found["start_s"] < 0.01
