"""A study of settings by Optuna: ``hts-torchrl tune``.

``study_file`` reads what to search, ``study`` is Optuna's study in its folder, ``trial`` reads and
watches one trial's evaluations.
"""
