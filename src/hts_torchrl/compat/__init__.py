"""Every use of what another library keeps private: one file for each library.

Nothing promises that these names stay. Each has a test in ``tests/unit/compat`` that fails with the
library and its version where a release has changed it; the rest of the package uses public names.
"""

TORCHRL_WRAPPED = "_env"
"""Attribute in which a TorchRL wrapper, such as ``GymWrapper``, keeps what it wraps."""
