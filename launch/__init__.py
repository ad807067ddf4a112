"""Launch: who the ranks are, and how small things pass between them.

Layers, each importing only what stands below it:

    run > processes           `tpspan run`: starts a job; needs no torch
    start                     init, world: from a launched process to a world
    world                     World: the ranks, what each has, what it owns
    torch_group               torch.distributed set up under any launcher
    mpi > mpi_start           the control plane over MPI
    torchrun > store          the control plane over a store of torch: torchrun, srun, a group
    control                   the star of ranks: all-gather, broadcast, barrier, with deadlines
    votes                     a step that all ranks take or none
    hosts  slurm  environment pure: who sits where, where ranks meet, which rank this is
    failure                   what happens when a rank fails

Only what needs no torch is offered here, so that starting a job is quick; `tpspan` itself offers
`init`, `world` and `World`.
"""

from tpspan.launch.environment import Launch, detect

__all__ = ["Launch", "detect"]
