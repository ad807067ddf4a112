"""``tpspan bench``: what spans cost and give on this machine, checked first, then measured.

From the bottom: ``measuring`` starts the ranks together and turns samples into figures; ``values``
checks what a span holds; ``load`` keeps a device busy; ``allocating``, ``waiting``, ``remapping``,
``reading``, ``peers`` and ``scaling`` each measure one thing; ``report`` shows and writes figures;
``span`` runs them all on a rank; ``command`` is the command line and starts the ranks.
"""
