"""Everything private of Orbax, JAX and etils that we touch, and every difference between their releases.

No other room imports a private module of theirs or touches a private attribute.

    runtime.py        JAX: the coordination service, arrays, dtypes
    hooks.py          functions that are replaced for a while: as data, and how they are put back
    stock_handlers.py Orbax's own single-replica handler, whoever makes it
    array_handler.py  Orbax's ArrayHandler: its settings, the metadata it keeps, how it reads
    saved_tree.py     the tree of a checkpoint as Orbax restores it
    v1_contexts.py    Contexts of Orbax's v1 API: their array handler, and our knobs on them
    object_stores.py  a new URL scheme for Orbax and etils
    defects.py        known defects of Orbax's single-replica restore, as data
    probes.py         finds which of them the installed Orbax has; probing.py runs it in a process
    patching.py       reads and applies the patches that fix them
"""
