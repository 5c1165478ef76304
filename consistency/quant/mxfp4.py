"""The codec: tensors to MXFP4 (or MXFP8) blocks and back, in integers, one path for everything.

`pack` and `qdq` are one kernel with different outputs, and `unpack` decodes with the same function,
so ``qdq(w) == unpack(pack(w))`` holds by construction, for every input. On a GPU the same integer
arithmetic runs in Triton and gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels.microscaling import dequantise_blocks, quantise_blocks
from consistency.quant.formats import BLOCK, BlockFormat
from consistency.quant.settings import QuantSettings

_OUT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A quantised tensor: codes, scales, and how they were made.

    Args:
        codes: uint8 [..., K / 32 * bytes per block]: for MXFP4 [..., K / 2], the even index in the
            low nibble; for MXFP8 [..., K].
        scales: uint8 [..., K / 32], E8M0.
        settings: the quantiser's.

    Raises:
        InvalidInputError: a dtype, or shapes that do not belong together.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    settings: QuantSettings

    def __post_init__(self) -> None:
        for name in ("codes", "scales"):
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
                kind = getattr(tensor, "dtype", type(tensor).__name__)
                raise InvalidInputError(f"{name} must be a uint8 tensor, got {kind}: view it")
        wanted = (
            *self.scales.shape[:-1],
            self.scales.shape[-1] * self.settings.format.block_bytes if self.scales.dim() else 0,
        )
        if self.scales.dim() == 0 or tuple(self.codes.shape) != wanted:
            raise InvalidInputError(
                f"codes have shape {tuple(self.codes.shape)}, scales {tuple(self.scales.shape)}: "
                f"{self.settings.format.value} needs codes of shape {wanted}"
            )

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that the codes stand for."""
        return torch.Size((*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK))

    @property
    def byte_count(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel()


def pack(
    x: torch.Tensor, settings: QuantSettings, *, axis: int = -1, name: str = "x"
) -> PackedTensor:
    """Quantises a tensor in blocks along its last axis.

    Args:
        x: [..., K], of the settings' source dtype or float32 (then rounded to it first), any
            strides; K a multiple of 32.
        settings: the quantiser's.
        axis: the contraction axis of `x`; only the last one can be quantised.
        name: what to call `x` in errors.

    Raises:
        InvalidInputError: NaN or infinity (also one that rounding to the source dtype makes), K not
            a multiple of 32, another axis, or `x` already packed.
        UnsupportedError: another dtype.
    """
    x = _checked(x, settings, axis, name)
    shape, device = x.shape, x.device
    blocks = shape[-1] // BLOCK
    codes = torch.empty(
        (*shape[:-1], blocks * settings.format.block_bytes), dtype=torch.uint8, device=device
    )
    scales = torch.empty((*shape[:-1], blocks), dtype=torch.uint8, device=device)
    _quantise(x, settings, name, packed=codes, scales=scales)
    return PackedTensor(codes, scales, settings)


def pack_with_scales(
    x: torch.Tensor, scales: torch.Tensor, settings: QuantSettings, *, name: str = "x"
) -> PackedTensor:
    """Rounds a tensor to MXFP4 under scales that are given, saturating at 6 times the scale.

    Args:
        x: as in `pack`.
        scales: uint8 [..., K / 32], each below 255.
        settings: the quantiser's; its scale rule is not used.
        name: what to call `x` in errors.

    Raises:
        InvalidInputError: as in `pack`; scales of another shape or dtype, or with the byte 255.
        UnsupportedError: another dtype, or MXFP8.
    """
    x = _checked(x, settings, -1, name)
    if settings.format is not BlockFormat.MXFP4:
        raise UnsupportedError("given scales exist for mxfp4 alone: use pack for mxfp8")
    codes = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    packed = PackedTensor(codes, scales.contiguous(), settings)
    if bool((packed.scales == 255).any()):
        raise InvalidInputError("scales hold the byte 255, which is NaN: give scales below it")
    _quantise(x, settings, name, given=packed.scales, packed=codes)
    return packed


def unpack(packed: PackedTensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values that the codes stand for, exactly.

    Args:
        packed: the quantised tensor; bytes of any origin.
        dtype: of the result, bfloat16 or float32.

    Raises:
        InvalidInputError: a scale byte 255 or a NaN code, or a value that `dtype` cannot hold (with
            scale bytes that `pack` never writes).
        UnsupportedError: another dtype.
    """
    _require_out_dtype(dtype)
    codes, scales = packed.codes.contiguous(), packed.scales.contiguous()
    out = torch.empty(packed.shape, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    fault = dequantise_blocks(codes, scales, packed.settings.format, out)
    if fault >= 0:
        where = _index(fault, scales.shape)
        raise InvalidInputError(
            f"block {where} has scale byte {int(scales.reshape(-1)[fault])} and codes that are NaN "
            f"or outside the range of {dtype}: the checkpoint is damaged or was written by a "
            "quantiser that saw NaN"
        )
    return out


def qdq(
    x: torch.Tensor,
    settings: QuantSettings,
    *,
    axis: int = -1,
    out_dtype: torch.dtype | None = None,
    name: str = "x",
) -> torch.Tensor:
    """Quantises and dequantises: ``unpack(pack(x))`` without the bytes, and without a gradient.

    Args:
        x, settings, axis, name: as in `pack`.
        out_dtype: bfloat16 or float32, both exact; by default that of `x`.

    Returns:
        Contiguous, of the shape of `x`.

    Raises:
        InvalidInputError, UnsupportedError: as `pack`.
    """
    out_dtype = x.dtype if out_dtype is None and isinstance(x, torch.Tensor) else out_dtype
    x = _checked(x, settings, axis, name)
    _require_out_dtype(out_dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _quantise(x, settings, name, out=out)
    return out


def _checked(x: torch.Tensor, settings: QuantSettings, axis: int, name: str) -> torch.Tensor:
    """`x` without gradient and contiguous, or one clear error."""
    if isinstance(x, PackedTensor):
        raise InvalidInputError(
            f"{name} is packed already: quantise the tensor that it was made from, or unpack it"
        )
    if not isinstance(x, torch.Tensor):
        raise InvalidInputError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in (settings.source, torch.float32):
        hint = (
            "it looks packed already: unpack it first"
            if x.dtype in (torch.uint8, torch.int8)
            else f"source_dtype is {settings.source_dtype}: convert it, or change source_dtype on "
            "both sides"
        )
        raise UnsupportedError(f"{name} has dtype {x.dtype}; {hint}")
    if x.dim() == 0:
        raise InvalidInputError(
            f"{name} is a scalar: only tensors with a contraction axis have blocks"
        )
    if axis not in (-1, x.dim() - 1):
        raise InvalidInputError(
            f"{name} has contraction axis {axis} of shape {tuple(x.shape)}: blocks lie along the "
            f"last axis; transpose it first (x.transpose({axis}, -1))"
        )
    if x.shape[-1] % BLOCK:
        raise InvalidInputError(
            f"{name} has shape {tuple(x.shape)}: its last dimension must be a multiple of {BLOCK}; "
            "exclude the tensor, or pad it by whole blocks"
        )
    return x.detach().contiguous()


def _quantise(
    x: torch.Tensor,
    settings: QuantSettings,
    name: str,
    *,
    given: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    if x.numel() == 0:
        return
    fault = quantise_blocks(
        x,
        settings.format,
        source=settings.source,
        carry=settings.scale_rule.carry(settings.format),
        given=given,
        packed=packed,
        scales=scales,
        out=out,
    )
    if fault >= 0:
        block = x.reshape(-1, BLOCK)[fault].to(settings.source)
        place = int((~torch.isfinite(block)).int().argmax())
        index = _index(fault * BLOCK + place, x.shape)
        raise InvalidInputError(
            f"{name}[{', '.join(map(str, index))}] is {float(block[place])} as "
            f"{settings.source_dtype}: a block with NaN or infinity has no scale; find where it "
            "comes from (a diverged step?)"
        )


def _require_out_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in _OUT_DTYPES:
        raise UnsupportedError(f"out dtype {dtype} is not supported: use bfloat16 or float32")


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))
