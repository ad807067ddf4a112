"""Launch: who the ranks are and how small things pass between them.

Layers, each importing only what stands below it:

    run                       `tpspan run`: starts a job; needs no torch
    start                     init, world: from a launched process to a world
    world                     World
    mpi  torchrun > store     what carries the control plane: MPI, or a store of torch
    torch_group               torch.distributed set up from any launcher
    control                   the star of ranks: all-gather, broadcast, barrier, with deadlines
    hosts  slurm  environment pure: who sits where, where ranks meet, which rank this is
    failure                   what happens when a rank fails
"""
