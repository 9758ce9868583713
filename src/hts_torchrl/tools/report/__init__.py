"""The report of several runs: one page, tables and pictures.

``run_folder`` reads runs, ``groups`` puts seeds of the same settings together, ``intervals`` has
the statistics (rliable), ``tables`` and ``figures`` show them, ``page`` writes all files.
"""
