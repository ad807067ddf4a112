"""Steps of processes that publish and attach; ``state`` is what such a process has so far."""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any

import torch
from torch import nn

import tpspan
from harness import leaks
from tpspan.errors import TpspanError

PAGE = 2 << 20
State = dict[str, Any]


def tensors(value: int, device: str = "cpu", num_blocks: int = 3) -> dict[str, torch.Tensor]:
    """Tensors that fill so many pages, and one that says what all of their elements are."""
    made = {
        f"w{index}": torch.full((PAGE // 4 - 64,), float(value), device=device)
        for index in range(num_blocks)
    }
    return {**made, "value": torch.tensor([value], device=device)}


def publish(state: State, name: str, value: int = 1, **options: Any) -> int:
    """Publish tensors of one value, in blocks of one page."""
    device = options.pop("device", "cpu")
    num_blocks = options.pop("num_blocks", 3)
    options.setdefault("block_nbytes", PAGE)
    state["p"] = tpspan.publish(tensors(value, device, num_blocks), name, **options)
    return int(state["p"].version)


def write(state: State, value: int, *names: str) -> None:
    """Write a value to some tensors, or to all."""
    publication = state["p"]
    publication.thaw(*names)
    for name in names or tuple(publication):
        publication[name].fill_(value)


def commit(state: State, **options: Any) -> int:
    """The number of the new version."""
    return int(state["p"].commit(**options))


def next_version(state: State, value: int) -> int:
    """Write everything, and commit it."""
    write(state, value)
    return commit(state)


def unpublish(state: State, remove: bool = True) -> None:
    """Close the publication."""
    state.pop("p").close(remove=remove)


def attach(state: State, name: str, key: str = "a", **options: Any) -> int:
    """Attach, and say which version it is."""
    state[key] = tpspan.attach(name, **options)
    return int(state[key].version)


def value_of(state: State, key: str = "a") -> int:
    """The one value of all elements; an error if they differ, that is if a version is torn."""
    attached = state[key]
    value = int(attached["value"])
    for name in attached:
        if not bool((attached[name] == value).all()):
            raise AssertionError(f"{name} is not {value} throughout: a torn version")
    return value


def first_of(state: State, name: str, key: str = "a") -> float:
    """One element."""
    return float(state[key][name].view(-1)[0])


def update(state: State, key: str = "a") -> tuple[bool, int]:
    """Flip to the newest version."""
    return state[key].update(), state[key].version


def wait_and_flip(state: State, version: int, timeout_s: float = 20.0) -> tuple[float, int]:
    """Wait for a version, flip to it; returns when that was done, and the value."""
    state["a"].wait_for(version, timeout_s)
    state["a"].update()
    return time.time(), value_of(state)


def flip_until(state: State, last: int, deadline_s: float = 300.0) -> int:
    """Flip as often as there is something new, check every version, until the last."""
    attached, flips, end = state["a"], 0, time.monotonic() + deadline_s
    while attached.version < last:
        assert time.monotonic() < end
        if attached.update():
            flips += 1
            assert value_of(state) == attached.version
    return flips


def commit_many(state: State, first: int, last: int) -> None:
    """Versions whose value is their number."""
    for value in range(first, last + 1):
        assert next_version(state, value) == value


def detach(state: State, key: str = "a") -> None:
    """Close the attachment."""
    state.pop(key).close()


def held(state: State, key: str = "a") -> int:
    """Bytes of memory that reading everything has cost this process."""
    for name in state[key]:
        state[key][name].sum().item()
    return int(state[key].held_nbytes())


def poke(state: State, key: str = "a") -> None:
    """Write where it may not be written."""
    state[key]["w0"][0] = 99.0


def model(seed: int = 0, meta: bool = False, device: str = "cpu") -> Any:
    """A module with tied weights, a buffer, and one that a state dict does not hold."""
    torch.manual_seed(seed)
    made: Any = nn.ModuleDict(
        {
            "embed": nn.Embedding(64, 32),
            "norm": nn.BatchNorm1d(32),
            "head": nn.Linear(32, 64, bias=False),
        }
    )
    made["head"].weight = made["embed"].weight
    made.register_buffer("table", torch.arange(16.0) + seed, persistent=False)
    made = made.to(device)
    if meta:
        made = made.to("meta")
        made["head"].weight = made["embed"].weight
    return made


def publish_model(state: State, name: str, seed: int = 0, **options: Any) -> int:
    """Publish a module."""
    device = options.pop("device", "cpu")
    is_meta = device == "meta"
    state["m"] = model(seed, meta=is_meta, device="cpu" if is_meta else device)
    state["p"] = tpspan.publish(state["m"], name, **options)
    return int(state["p"].version)


def sums(state: State, key: str = "m") -> dict[str, float]:
    """The sum of every tensor of a module, by name."""
    module = state[key]
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: float(tensor.detach().double().sum()) for name, tensor in named.items()}


def set_up(device: str) -> None:
    """Do once what a process does at its first use of a device, and keeps."""
    if device == "cpu":
        return
    name = f"first use by {os.getpid()}"
    publication = tpspan.publish({"w": torch.ones(8, device=device)}, name)
    tpspan.attach(name).close()
    publication.close(remove=True)


def fork(state: State) -> int:
    """Have a child that inherits all connections, and does nothing."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def snapshot(state: State, device: str) -> None:
    """Remember what this process holds."""
    set_up(device)
    state["before"] = leaks.take()


def leaked(state: State) -> dict[str, str]:
    """What it holds more now."""
    return leaks.settle(state["before"])[1]


def listen(state: State) -> None:
    """Note every version that the callback is told of."""
    state["heard"] = []
    state["a"].on_version(state["heard"].append)


def heard(state: State) -> list[int]:
    """What it was told."""
    return list(state["heard"])


def roam(state: State, seed: int, seconds: float, names: list[str], device: str) -> dict[str, int]:
    """Publish, commit, attach, update and close at random; every version must be whole.

    What others do to the names is no error: taken, unknown, gone.
    """
    dice, end = random.Random(seed), time.monotonic() + seconds
    publications: dict[str, Any] = {}
    attached: list[dict[str, Any]] = []
    counts: dict[str, int] = {}

    def publish_one() -> None:
        name = dice.choice(names)
        if name not in publications:
            options: Any = {"read_only": dice.random() < 0.3, "keep": dice.choice((1, 2, 3))}
            value = dice.randrange(1000)
            made = tpspan.publish(tensors(value, device, 2), name, block_nbytes=PAGE, **options)
            publications[name] = made

    def commit_one() -> None:
        if publications:
            name = dice.choice(list(publications))
            next_version({"p": publications[name]}, dice.randrange(1000))

    def unpublish_one() -> None:
        if publications:
            name = dice.choice(list(publications))
            publications.pop(name).close(remove=dice.random() < 0.5)

    def attach_one() -> None:
        if len(attached) < 4:
            options: Any = {"replicate": dice.random() < 0.2}
            attached.append({"a": tpspan.attach(dice.choice(names), **options)})
            value_of(attached[-1])

    def update_one() -> None:
        if attached:
            one = dice.choice(attached)
            one["a"].update()
            value_of(one)

    def wait_one() -> None:
        if attached:
            with contextlib.suppress(TimeoutError):
                dice.choice(attached)["a"].wait_for(timeout_s=0.05)

    def listen_one() -> None:
        if attached:
            with contextlib.suppress(ValueError):  # it listens already
                dice.choice(attached)["a"].on_version(lambda _: None)

    def detach_one() -> None:
        if attached:
            attached.pop(dice.randrange(len(attached)))["a"].close()

    def look() -> None:
        tpspan.published()

    steps = {
        publish_one: 4,
        commit_one: 8,
        unpublish_one: 2,
        attach_one: 4,
        update_one: 12,
        detach_one: 3,
        wait_one: 2,
        listen_one: 1,
        look: 1,
    }
    while time.monotonic() < end:
        step = dice.choices(list(steps), list(steps.values()))[0]
        try:
            step()
            outcome = step.__name__
        except TpspanError as error:
            outcome = type(error).__name__
            if outcome not in (
                "NameTakenError",
                "UnknownNameError",
                "VersionGoneError",
                "KeeperError",
            ):
                raise
        counts[outcome] = counts.get(outcome, 0) + 1
    for one in attached:
        value_of(one)
        one["a"].close()
    for publication in publications.values():
        publication.close(remove=True)
    return counts
