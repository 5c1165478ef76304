// Matrix products: C = A B + bias, from any strides and element types.
//
// Order of reduction. K is cut into `chunks` equal parts, a part into blocks of 256 steps, a block
// into chains of 64. A chain is fused multiply-adds strictly in k, from +0, in fp32. The chains of a
// block are added in order, the blocks of a part in order, the parts by a binary tree of neighbours;
// then the bias is added and the result is rounded once. Nothing else enters: not M, N, tiles,
// threads, strides or the instruction set.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.hpp"

namespace lockstep {

// Strides count elements.
struct Operand {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
  DType dtype;
  // For the packed columns of a B in MXFP4, else null: `data` holds codes, two per byte; blocks of 32
  // with one scale byte each lie along rows (row_stride is 1, column_stride a multiple of 32). The
  // numbers are those of the bf16 matrix that the codes stand for.
  const uint8_t* scales = nullptr;
};

struct Result {
  void* data;
  int64_t row_stride;
  int64_t column_stride;
  DType dtype;
};

enum Mode : int32_t {
  kWrite = 0,       // C = product
  kAccumulate = 1,  // C = C + product, one addition in fp32; an empty product leaves C alone
  kContinue = 2,    // the blocks are added to C, in order; one chunk, fp32. Products over pieces of K
                    // whose lengths are multiples of 256, the first with kWrite, are the whole.
};

struct Product {
  int64_t m, n, k;
  Operand a;  // [m, k]
  Operand b;  // [k, n]
  const void* bias;  // [n] contiguous, or null
  DType bias_dtype;
  Result c;  // [m, n]
  int64_t chunks;
  Mode mode;
};

// Computes every product; throws std::bad_alloc when there is no memory for scratch buffers.
void multiply(const std::vector<Product>& products, int32_t threads);

}  // namespace lockstep
