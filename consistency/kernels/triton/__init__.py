"""The numerics contract on CUDA and HIP devices: one module per operation, written in Triton.

Nothing here is called directly. The functions of `consistency.kernels` check their arguments and
send CUDA tensors to these modules; inside `interpreted()` they send CPU tensors here too, which
runs the same code in Triton's interpreter::

    # TRITON_INTERPRET=1 must stand in the environment before Triton is imported.
    from consistency import kernels
    from consistency.kernels.triton import interpreted

    with interpreted():
        y = kernels.linear(x, weight)

Every launch goes through `launch`, which states each compiler option that can move a bit.
"""

from __future__ import annotations

from consistency.kernels._dispatch import interpreted

__all__ = ["interpreted"]
