"""Portable bits: kernels that every x86-64 processor with AVX2 has, instead of its fastest ones.

Three libraries under torch choose kernels by the processor, and other kernels have other last bits:
ATen (``ATEN_CPU_CAPABILITY``), oneDNN (``ONEDNN_MAX_CPU_ISA``) and MKL (``MKL_CBWR``, whose
``COMPATIBLE`` is the one branch that Intel promises on processors of other makers). They read these
variables when they compute for the first time, so a process must begin with them. Imports no torch.
"""

from __future__ import annotations

import os

VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
}
"""Of the environment of a process that computes portable bits, and of its workers."""


def is_portable() -> bool:
    """Return whether this process computes with the kernels that all such processors have."""
    return VARIABLES.items() <= os.environ.items()
