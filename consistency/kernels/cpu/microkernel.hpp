// The innermost loops of a matrix product: a few rows of A against a few columns of B, kept in
// registers while k runs. Both kernels perform the same chain of operations for each element.
#pragma once

#include "packing.hpp"

namespace lockstep {

// A block of 256 steps in k is four chains of 64 fused multiply-adds, each from +0, added in order;
// blocks are added in order too. Short chains keep the error of a long reduction near that of a
// tree, and several of them hide the latency of one.
constexpr int64_t kChain = 64;
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

// partial[row * ld + 16 p + lane] = the block's sum, added to what is there unless `first`. a is a
// packed block of rows kRowStride apart, b holds kPanels packed panels; 0 < depth <= kDepth.
template <int kRows, int kPanels>
inline void tile(const float* a, const float* b, int64_t depth, float* partial, int64_t ld,
                 bool first) {
  alignas(64) float block[kRows * kPanels * kLanes];
  for (int64_t begin = 0; begin < depth; begin += kChain) {
    const int64_t end = std::min(begin + kChain, depth);
    F16 sums[kRows][kPanels];
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) sums[row][p] = zero();
#pragma GCC unroll 4
    for (int64_t k = begin; k < end; ++k) {
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
    const bool last = end == depth;
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        float* place = block + (row * kPanels + p) * kLanes;
        F16 sum = sums[row][p];
        if (begin > 0) sum = add(load(place), sum);
        if (!last) {
          store(place, sum);
          continue;
        }
        float* total = partial + row * ld + p * kLanes;
        store(total, first ? sum : add(load(total), sum));
      }
  }
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

// Groups of eight columns of B whose chains run side by side: enough of them to hide the latency of
// a multiply-add, few enough to stay in registers.
template <int kRows>
constexpr int kLive = kRows <= 2 ? 4 : kRows <= 4 ? 2 : 1;

// Groups of eight columns that are walked together.
constexpr int64_t kGroups = 4;

// A few rows of A (fp32, lda apart) against 8 kCount columns of B that are contiguous in k and that
// are transposed in registers, never written back: memory traffic is the weight, once.
// chains[(group * kRows + row) * 8 + lane] = one chain over `depth` <= kChain steps.
template <int kRows, int kCount, DType kType>
inline void stream_chains(const float* a, int64_t lda, const Element<kType>* b, int64_t stride,
                          int64_t depth, float* chains) {
  constexpr int64_t kStep = kTransposeStep<kType>;
  __m256 lanes[kCount][kRows];
#pragma GCC unroll 4
  for (int group = 0; group < kCount; ++group)
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) lanes[group][row] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
#pragma GCC unroll 4
    for (int group = 0; group < kCount; ++group)
      transpose_rows<kType>(b + group * 8 * stride + k, stride,
                            [&](int step, __m256 columns) __attribute__((always_inline)) {
#pragma GCC unroll 8
                              for (int row = 0; row < kRows; ++row)
                                lanes[group][row] =
                                    _mm256_fmadd_ps(_mm256_broadcast_ss(a + row * lda + k + step),
                                                    columns, lanes[group][row]);
                            });
  }
#pragma GCC unroll 4
  for (int group = 0; group < kCount; ++group)
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
      _mm256_storeu_ps(chains + (group * kRows + row) * 8, lanes[group][row]);
  for (; k < depth; ++k)
    for (int64_t column = 0; column < kCount * 8; ++column) {
      const float value = widen<kType>(b[column * stride + k]);
      for (int row = 0; row < kRows; ++row) {
        float& chain = chains[(column / 8 * kRows + row) * 8 + column % 8];
        chain = __builtin_fmaf(a[row * lda + k], value, chain);
      }
    }
}

// sums[(group * kRows + row) * 8 + lane] = `depth` steps for `groups` <= kGroups groups, added to
// what is there unless `first`.
template <int kRows, DType kType>
inline void stream_columns(const float* a, int64_t lda, const Element<kType>* b, int64_t stride,
                           int64_t groups, int64_t depth, float* sums, bool first) {
  constexpr int64_t kLine = 64 / sizeof(Element<kType>);
  alignas(64) float chains[kGroups * kRows * 8], block[kGroups * kRows * 8];
  const int64_t size = groups * kRows * 8;
  for (int64_t k = 0; k < depth; k += kChain) {
    const int64_t steps = std::min(kChain, depth - k);
    // The same place of the next columns: far enough ahead for memory, near enough for L2.
    for (int64_t column = groups * 8; column < groups * 16; ++column)
      for (int64_t line = 0; line < steps; line += kLine)
        __builtin_prefetch(b + column * stride + k + line, 0, 2);
    int64_t group = 0;
    for (; group + kLive<kRows> <= groups; group += kLive<kRows>)
      stream_chains<kRows, kLive<kRows>, kType>(a + k, lda, b + group * 8 * stride + k, stride,
                                                steps, chains + group * kRows * 8);
    for (; group < groups; ++group)
      stream_chains<kRows, 1, kType>(a + k, lda, b + group * 8 * stride + k, stride, steps,
                                     chains + group * kRows * 8);
    if (k % kDepth == 0) std::copy_n(chains, size, block);
    else for (int64_t i = 0; i < size; ++i) block[i] += chains[i];
    if ((k + kChain) % kDepth != 0 && k + kChain < depth) continue;
    if (first && k < kDepth) std::copy_n(block, size, sums);
    else for (int64_t i = 0; i < size; ++i) sums[i] += block[i];
  }
}
#endif

}  // namespace lockstep
