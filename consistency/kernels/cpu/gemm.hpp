// Matrix products: C = A B + bias, from any strides and element types.
//
// Order of reduction. K is cut into `chunks` equal parts. Inside a part, one element of C is a
// chain of fused multiply-adds strictly in k, from +0, in fp32. The parts are joined by a binary
// tree of neighbours, the bias is added, and the result is rounded once. Nothing else enters: not
// M, N, tiles, threads, strides or the instruction set.
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
  kContinue = 2,    // the chain of each element starts from C instead of +0; one chunk, fp32
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
