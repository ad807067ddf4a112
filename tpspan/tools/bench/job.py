"""A bench as a rank of a job: join, run, and end with a status that is the same on all ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import tpspan
from tpspan.errors import TpspanError
from tpspan.launch.world import World


def in_job(options: argparse.Namespace, run: Callable[[World], None]) -> int:
    """Make the world that the options ask for and run a bench in it. Collective.

    Returns:
        The exit status: 2 if the launcher started another number of ranks than ``--ranks``, 1 if
        the bench failed, on whichever rank.
    """
    with tpspan.init(
        options.backend, torch_distributed=True, share_device=options.share_device
    ) as world:
        if options.ranks not in (None, world.world_size):
            if world.rank == 0:
                print(
                    f"tpspan bench: --ranks {options.ranks}, but the launcher started "
                    f"{world.world_size}",
                    file=sys.stderr,
                )
            return 2
        try:
            run(world)
        except TpspanError as error:
            # Every rank has it, or had it reported: one of them says it.
            failed = not isinstance(error, tpspan.PeerError)
            if failed or world.rank == 0:
                print(f"tpspan bench, rank {world.rank}: {error}", file=sys.stderr)
            return 1
    return 0
