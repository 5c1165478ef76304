// Packed MXFP4 columns as the dense blocks that the inner loops of a product read. Every value is
// exact, so a product with packed weights has the bits of one with the bf16 weights they stand for.
#pragma once

#include "microscaling.hpp"

namespace lockstep {

// bits[32] = fp32 bits of the block with this number.
inline void unpack_block(const uint8_t* codes, const uint8_t* scales, int64_t block,
                         uint32_t* bits) {
  uint32_t unpacked[kBlock];
  MXFP4::unpack(codes + block * MXFP4::kBytes, unpacked);
  MXFP4::decode(unpacked, scales[block], bits);
}

// out[r * ld + c] = element (row + r, column + c), where element (r, c) is number c * stride + r.
// row and stride are multiples of 32.
inline void unpack_panel(const uint8_t* codes, const uint8_t* scales, int64_t stride, int64_t row,
                         int64_t column, int64_t rows, int64_t columns, float* out, int64_t ld) {
  alignas(64) uint32_t bits[kLanes][kBlock];
  for (int64_t r = 0; r < rows; r += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, rows - r);
    for (int64_t first = 0; first < columns; first += kLanes) {
      const int64_t width = std::min<int64_t>(kLanes, columns - first);
      for (int64_t c = 0; c < width; ++c)
        unpack_block(codes, scales, ((column + first + c) * stride + row + r) / kBlock, bits[c]);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < width; ++c)
          std::memcpy(out + (r + i) * ld + first + c, &bits[c][i], sizeof(float));
    }
  }
}

// out[c * ld + r] = the bf16 bits of element (row + r, column + c). row, rows and stride are
// multiples of 32.
inline void unpack_columns(const uint8_t* codes, const uint8_t* scales, int64_t stride, int64_t row,
                           int64_t column, int64_t rows, int64_t columns, uint16_t* out,
                           int64_t ld) {
  alignas(64) uint32_t bits[kBlock];
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; r += kBlock) {
      unpack_block(codes, scales, ((column + c) * stride + row + r) / kBlock, bits);
      for (int i = 0; i < kBlock; ++i)
        out[c * ld + r + i] = static_cast<uint16_t>(bits[i] >> 16);
    }
}

}  // namespace lockstep
