// The innermost loops of a matrix product: a few rows of A against a few columns of B, kept in
// registers while k runs. Both kernels perform the same chain of operations for each element.
#pragma once

#include "packing.hpp"

namespace lockstep {

// The depth of a packed block. Partial sums are stored and reloaded as fp32 between blocks, which
// changes no bit.
constexpr int64_t kDepth = 256;

// Between rows of a packed block of A: off a power of two, so that rows spread over cache sets.
constexpr int64_t kRowStride = kDepth + kLanes;

// Columns of B per packed panel: panel[k * kLanes + column].
constexpr int64_t kPanel = kDepth * kLanes;

// Registers: AVX-512 holds 12 x 2 accumulators of 16 lanes, AVX2 6 x 1 (of two registers each).
#if defined(LOCKSTEP_TILE_ROWS)
constexpr int kTileRows = LOCKSTEP_TILE_ROWS;
constexpr int kTilePanels = LOCKSTEP_TILE_PANELS;
#elif defined(__AVX512F__)
constexpr int kTileRows = 12;
constexpr int kTilePanels = 2;
#else
constexpr int kTileRows = 6;
constexpr int kTilePanels = 1;
#endif

// partial[row * ld + 16 p + lane] continues (or starts, when `first`) its chain over `depth` steps.
// a is a packed block of rows kRowStride apart, b holds kPanels packed panels.
template <int kRows, int kPanels>
inline void tile(const float* a, const float* b, int64_t depth, float* partial, int64_t ld,
                 bool first) {
  F16 sums[kRows][kPanels];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p)
      sums[row][p] = first ? zero() : load(partial + row * ld + p * kLanes);
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    F16 columns[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) columns[p] = load(b + p * kPanel + k * kLanes);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const F16 value = set1(a[row * kRowStride + k]);
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) sums[row][p] = fma(value, columns[p], sums[row][p]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) store(partial + row * ld + p * kLanes, sums[row][p]);
}

// All `rows` of a packed block against kPanels panels.
template <int kPanels, int kRows = kTileRows>
inline void tile_rows(int64_t rows, const float* a, const float* b, int64_t depth, float* partial,
                      int64_t ld, bool first) {
  for (; rows >= kRows; rows -= kRows, a += kRows * kRowStride, partial += kRows * ld)
    tile<kRows, kPanels>(a, b, depth, partial, ld, first);
  if constexpr (kRows > 1)
    if (rows > 0) tile_rows<kPanels, kRows - 1>(rows, a, b, depth, partial, ld, first);
}

#if defined(__AVX2__)
// The most rows of A that `stream` takes.
constexpr int kStreamRows = 8;

// A few rows of A (fp32, lda apart) against eight columns of B that are contiguous in k and that
// are transposed in registers, never written back: memory traffic is the weight, once.
// sums[row * 8 + lane] continues its chain over `depth` steps.
template <int kRows, DType kType>
inline void stream(const float* a, int64_t lda, const Element<kType>* b, int64_t stride,
                   float* sums) {
  __m256 lanes[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) lanes[row] = _mm256_loadu_ps(sums + row * 8);
  transpose_rows<kType>(b, stride, [&](int k, __m256 columns) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
      lanes[row] = _mm256_fmadd_ps(_mm256_broadcast_ss(a + row * lda + k), columns, lanes[row]);
  });
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) _mm256_storeu_ps(sums + row * 8, lanes[row]);
}

// Groups of eight columns that are walked together.
constexpr int64_t kGroups = 4;

// Steps in k per visit: a cache line of every column, so that no line has to survive in a small
// cache until the next visit.
template <DType kType>
constexpr int64_t kVisit = 64 / sizeof(Element<kType>);

// `groups` <= kGroups groups of eight columns over `depth` steps;
// sums[(group * kRows + row) * 8 + lane].
template <int kRows, DType kType>
inline void stream_columns(const float* a, int64_t lda, const Element<kType>* b, int64_t stride,
                           int64_t groups, int64_t depth, float* sums) {
  constexpr int64_t kStep = kTransposeStep<kType>;
  const int64_t whole = depth / kStep * kStep;
  for (int64_t k = 0; k < whole; k += kVisit<kType>) {
    // The same place of the next columns: far enough ahead for memory, near enough for L2.
    for (int64_t column = groups * 8; column < groups * 16; ++column)
      __builtin_prefetch(b + column * stride + k, 0, 2);
    const int64_t end = std::min(k + kVisit<kType>, whole);
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t step = k; step < end; step += kStep)
        stream<kRows, kType>(a + step, lda, b + group * 8 * stride + step, stride,
                             sums + group * kRows * 8);
  }
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t tail = whole; tail < depth; ++tail)
      for (int lane = 0; lane < 8; ++lane) {
        const float value = widen<kType>(b[(group * 8 + lane) * stride + tail]);
        for (int row = 0; row < kRows; ++row) {
          float& sum = sums[(group * kRows + row) * 8 + lane];
          sum = __builtin_fmaf(a[row * lda + tail], value, sum);
        }
      }
}
#endif

}  // namespace lockstep
