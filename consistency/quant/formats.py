"""Element formats of microscaling blocks and the rules that choose a block's scale.

A block is 32 consecutive elements along the contraction axis with one E8M0 scale byte b, which
means 2^(b - 127) (OCP Microscaling Formats Specification 1.0).
"""

from __future__ import annotations

from enum import Enum

BLOCK = 32
"""Elements that share a scale."""

_MANTISSA_BITS_OF_FP32 = 23
_WHOLE_MANTISSA = (1 << _MANTISSA_BITS_OF_FP32) - 1


class BlockFormat(Enum):
    """What the elements of a block are stored as.

    MXFP4 holds E2M1 codes, two per byte, the even index in the low nibble: 0, .5, 1, 1.5, 2, 3, 4,
    6 and their negatives. MXFP8 holds E4M3 codes without infinities, up to 448.
    """

    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"

    @property
    def code(self) -> int:
        """The number of bits of an element; also how the kernels are told the format."""
        return 4 if self is BlockFormat.MXFP4 else 8

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of one block."""
        return BLOCK * self.code // 8

    @property
    def mantissa_bits(self) -> int:
        """Explicit bits of an element's mantissa."""
        return 1 if self is BlockFormat.MXFP4 else 3

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest element: 6 = 1.5 * 2^2, 448 = 1.75 * 2^8."""
        return 2 if self is BlockFormat.MXFP4 else 8

    @property
    def largest_mantissa(self) -> int:
        """Mantissa of the largest element, as bits of an fp32 mantissa."""
        return 0x400000 if self is BlockFormat.MXFP4 else 0x600000

    @property
    def scale_range(self) -> tuple[int, int]:
        """First and last scale byte that is written: bf16 then holds every value as a normal
        number."""
        return (2, 252) if self is BlockFormat.MXFP4 else (10, 246)


class ScaleRule(Enum):
    """How the scale byte follows from the largest magnitude of a block.

    All rules are ``((bits + carry) >> 23) - largest_exponent`` on the fp32 bits of the magnitude,
    clamped to `BlockFormat.scale_range`; they differ in the carry alone.

    FLOOR drops the mantissa (OCP). EVEN rounds the magnitude to the element's precision first.
    RCEIL is the least power of two under which nothing saturates. CEIL rounds every mantissa up.
    """

    FLOOR = "floor"
    EVEN = "even"
    RCEIL = "rceil"
    CEIL = "ceil"

    def carry(self, block_format: BlockFormat) -> int:
        """What is added to the bits of the largest magnitude before the exponent is read."""
        if self is ScaleRule.FLOOR:
            return 0
        if self is ScaleRule.EVEN:
            return 1 << (_MANTISSA_BITS_OF_FP32 - block_format.mantissa_bits - 1)
        if self is ScaleRule.RCEIL:
            return _WHOLE_MANTISSA - block_format.largest_mantissa
        return _WHOLE_MANTISSA
