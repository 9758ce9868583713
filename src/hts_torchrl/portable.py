"""Portable bits: kernels that every x86-64 processor with AVX2 has, instead of its fastest ones.

Three libraries under torch choose kernels by the processor, and other kernels have other last bits:
ATen (``ATEN_CPU_CAPABILITY``), oneDNN (``ONEDNN_MAX_CPU_ISA``) and MKL (``MKL_CBWR``). Of MKL's
branches all but ``AUTO`` and ``COMPATIBLE`` are for Intel's processors only, and ``COMPATIBLE`` is
one code path for all (oneMKL's reference, "Named Constants for CNR Control"; oneDNN's guide, "CPU
Dispatcher Control"). They read these variables when they compute for the first time, so a process
must begin with them. Imports no torch.
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
