"""sample: one token per row by the Gumbel-max rule, with noise keyed by (seed, position)."""

from __future__ import annotations

import ctypes

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import require_float, require_integer, require_shape
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels, values_readable
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

_sample_kernel = Kernel(
    "lockstep_sample",
    *(POINTER, INT64, INT64, POINTER, POINTER, POINTER, POINTER, INT32, POINTER),
)
_gumbel_kernel = Kernel("lockstep_gumbel", INT64, INT64, INT64, POINTER)


@one_device
def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """token[t] = argmax over v of (logits[t, v] - max(logits[t])) / temperature[t] + noise(t, v).

    noise(t, v) = `gumbel_noise(seeds[t], positions[t], V)[v]`, so that token v has probability
    softmax(logits[t] / temperature[t])[v].

    Args:
        logits: float32 [T, V], any strides. -inf is never sampled; +inf always is.
        temperature: float32 [T], finite and 0 or more; 0 takes the argmax, the lowest index of
            equal logits, without noise.
        seeds: int64 [T], the seed of each row's request.
        positions: int64 [T], the position of the sampled token in its request.

    Returns:
        int64 [T]. A row's token depends on its logits, temperature, seed and position; not on other
        rows, its place among them, or the number of threads.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, a NaN logit, a row without a logit above -inf, or
            a negative or non-finite temperature.

    Order of reduction:
        None: of equal scores the lowest index wins.

    Source: E. J. Gumbel (1954); C. Maddison, D. Tarlow, T. Minka, "A* Sampling" (2014).
    """
    require_float("logits", logits, 2)
    require_float("temperature", temperature, 1)
    require_integer("seeds", seeds, 1)
    require_integer("positions", positions, 1)
    for name, tensor in (("logits", logits), ("temperature", temperature)):
        if tensor.dtype != torch.float32:
            raise UnsupportedError(f"{name} must be float32, got {tensor.dtype}: convert it")
    rows, width = logits.shape
    for name, tensor in (("temperature", temperature), ("seeds", seeds), ("positions", positions)):
        require_shape(name, tensor, (rows,), "one per row of logits")
    if width == 0 and rows:
        raise InvalidInputError("logits must have at least one column, got none")
    logits = logits.detach().contiguous()
    temperature = temperature.contiguous()
    seeds, positions = seeds.contiguous(), positions.contiguous()
    if on_triton(logits):
        kernels = triton_kernels("sampling")
        tokens, faults = kernels.sample(logits, temperature, seeds, positions)
        if values_readable(faults) and bool((faults >= 0).any()):
            row = int((faults >= 0).nonzero()[0])
            raise InvalidInputError(_explain(row * 3 + int(faults[row]), temperature))
        return tokens
    tokens = torch.empty(rows, dtype=torch.int64)
    fault = ctypes.c_int64(-1)
    _sample_kernel(
        logits.data_ptr(),
        rows,
        width,
        temperature.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        tokens.data_ptr(),
        thread_count(),
        ctypes.addressof(fault),
    )
    if fault.value >= 0:
        raise InvalidInputError(_explain(fault.value, temperature))
    return tokens


def _explain(fault: int, temperature: torch.Tensor) -> str:
    row, reason = divmod(fault, 3)
    if reason == 0:
        return f"logits[{row}] holds a NaN: the model's output is broken, nothing can be sampled"
    if reason == 1:
        return f"logits[{row}] has no entry above -inf: every token is masked"
    return f"temperature[{row}] must be finite and 0 or more, got {float(temperature[row])}"


def gumbel_noise(seed: int, position: int, width: int) -> torch.Tensor:
    """The noise that `sample` adds to the `width` logits of a row: float32 [width].

    noise = -log(-log(1 - w)) with w = (word + 1/2) / 2^32, clamped below 1. The words are those of
    Philox4x32-10 with key = seed and counter (c, position low, position high, 0): entry v takes
    word (v % 64) // 16 of counter c = 16 (v // 64) + v % 16.

    Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    if width < 0:
        raise InvalidInputError(f"width must be 0 or more, got {width}")
    noise = torch.empty(width, dtype=torch.float32)
    _gumbel_kernel(seed, position, width, noise.data_ptr())
    return noise
