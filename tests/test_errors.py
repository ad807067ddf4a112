"""Errors travel between ranks, and say what happened and what to do."""

from __future__ import annotations

import pickle

import pytest

from tpspan import errors
from tpspan.memory.advice import advise

PAGE = 2 << 20

ONE_OF_EACH = [
    errors.DriverError("cuMemMap", 1, "CUDA_ERROR_INVALID_VALUE", {"nbytes": 5}, "Do so", rank=3),
    errors.OutOfMemoryError(
        "cuMemCreate",
        2,
        "CUDA_ERROR_OUT_OF_MEMORY",
        {"nbytes": PAGE},
        "Less",
        requested_nbytes=PAGE,
        used_nbytes=70,
        free_nbytes=7,
    ),
    errors.PeerError([2, 0], "did not come"),
    errors.CollectiveMismatch("Span.allocate", {0: ("a", 1), 1: ("b", 2)}),
    errors.ClosedError("closed"),
    errors.InUseError("in use"),
    errors.CaptureError("captured"),
    errors.LaunchError("launch"),
    errors.CheckpointError("checkpoint"),
    errors.KeeperError("keeper"),
    errors.UnknownNameError("unknown"),
    errors.VersionGoneError("gone"),
    errors.NameTakenError("taken", 7),
    errors.PublicationMismatch("differs"),
]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_errors_pickle(error: errors.TpspanError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_every_error_is_here() -> None:
    kinds = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.TpspanError)
    }
    assert kinds - {type(error) for error in ONE_OF_EACH} == {errors.TpspanError}


def test_errors_are_those_that_python_programs_catch() -> None:
    driver, memory, peer, mismatch, closed, *_ = ONE_OF_EACH
    assert isinstance(driver, RuntimeError)
    assert isinstance(memory, MemoryError)
    assert isinstance(peer, RuntimeError)
    assert isinstance(mismatch, ValueError)
    assert isinstance(closed, ValueError)


def test_a_driver_error_names_all_it_knows() -> None:
    text = str(ONE_OF_EACH[0])
    for part in ("cuMemMap", "nbytes=5", "rank 3", "CUDA_ERROR_INVALID_VALUE", "Do so"):
        assert part in text
    text = str(ONE_OF_EACH[1])
    for part in ("requested 2097152 bytes", "used 70", "free 7"):
        assert part in text


def test_a_peer_error_names_the_ranks_in_order() -> None:
    assert str(ONE_OF_EACH[2]) == "ranks 0, 2: did not come"
    assert str(errors.PeerError([1], "died")) == "rank 1: died"


def test_a_mismatch_shows_what_each_rank_asked_for() -> None:
    text = str(ONE_OF_EACH[3])
    assert "rank 0: ('a', 1)" in text
    assert "rank 1: ('b', 2)" in text


@pytest.mark.parametrize(
    ("call", "code_name", "arguments", "part"),
    [
        ("cuMemCreate", "CUDA_ERROR_INVALID_VALUE", {"nbytes": 7}, "multiple of the page"),
        ("cuMemCreate", "CUDA_ERROR_INVALID_VALUE", {"nbytes": 0}, "positive multiple"),
        ("cuMemMap", "CUDA_ERROR_INVALID_VALUE", {"address": 9, "nbytes": PAGE}, "address must"),
        ("cuMemMap", "CUDA_ERROR_INVALID_VALUE", {"address": PAGE, "nbytes": PAGE}, "mapped whole"),
        ("cuMemUnmap", "CUDA_ERROR_INVALID_VALUE", {"nbytes": PAGE}, "unmapped whole"),
        ("cuMemRelease", "CUDA_ERROR_INVALID_HANDLE", {}, "released already"),
        ("cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE", {"nbytes": PAGE}, "peer access"),
        ("cuMemSetAccess", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", {}, "topo"),
        ("cuMemCreate", "CUDA_ERROR_INVALID_DEVICE", {"nbytes": PAGE}, "CUDA_VISIBLE_DEVICES"),
        ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", {"nbytes": PAGE}, "more ranks"),
        ("ftruncate", "ENOSPC", {"nbytes": PAGE}, "more ranks"),
        ("cuInit", "NO_DRIVER", {}, "backend='host'"),
        ("cuInit", "CUDA_ERROR_NO_DEVICE", {}, "--gpus all"),
        ("dup", "EMFILE", {}, "ulimit -n"),
        ("cuMemExportToShareableHandle", "CUDA_ERROR_OPERATING_SYSTEM", {}, "ulimit -n"),
        ("cuMemCreate", "CUDA_ERROR_NOT_PERMITTED", {"nbytes": PAGE}, "nvidia-imex"),
    ],
)
def test_advice_for_every_failure_that_users_meet(
    call: str, code_name: str, arguments: dict[str, object], part: str
) -> None:
    assert part in advise(call, code_name, arguments, PAGE)


def test_no_advice_where_nothing_is_known() -> None:
    assert advise("cuMemMap", "CUDA_ERROR_UNKNOWN", {}, PAGE) == ""
