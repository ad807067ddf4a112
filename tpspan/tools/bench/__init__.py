"""``tpspan bench``: what spans cost and give on this machine, checked first, then measured.

From the bottom: ``measuring`` starts the ranks together and turns samples into figures; ``values``
checks what a span holds; ``load`` keeps a device busy; ``allocating``, ``waiting``, ``remapping``,
``reading``, ``peers`` and ``scaling`` each measure one thing; ``report`` shows and writes figures;
``span`` runs them all on a rank. For calls of many sizes ``sweep`` lets everybody who can make
them take turns, ``torch_peers`` are torch's, ``gather`` and ``all_reduce`` say what is called, and
``sweep_report`` shows, writes and draws it. ``gather_matmul`` lets ``matmul_contenders`` multiply
by a gathered weight, with ``matmul_report`` and ``timeline``; ``fsdp`` trains a ``transformer``
both of FSDP2's ways. ``job`` makes a bench a rank of a job; ``command`` is the command line and
starts the ranks.
"""
