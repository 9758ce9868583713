"""The report of several runs: one page, tables and images.

``run_folder`` reads runs, ``groups`` puts seeds of the same settings together, ``intervals`` has
the statistics (rliable), ``figures`` the images, ``page`` makes tables and writes all files.
"""
