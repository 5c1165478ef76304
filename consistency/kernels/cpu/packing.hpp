// Copies of matrix blocks as dense fp32: widening is exact, so packing never changes a result.
#pragma once

#include <algorithm>

#include "typed.hpp"

namespace lockstep {

#if defined(__AVX2__)
// Reads the eight 32-bit words at `base` of each of eight rows; word j of all rows lands in t[j].
inline void load_words_transposed(const char* base, int64_t row_bytes, __m256 t[8]) {
  const char* low = base;
  const char* high = base + 4 * row_bytes;
  const auto pair = [&](int row, int offset) {
    const __m128 first =
        _mm_loadu_ps(reinterpret_cast<const float*>(low + row * row_bytes + offset));
    const __m128 second =
        _mm_loadu_ps(reinterpret_cast<const float*>(high + row * row_bytes + offset));
    return _mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1);
  };
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256 r0 = pair(0, 16 * half), r1 = pair(1, 16 * half);
    const __m256 r2 = pair(2, 16 * half), r3 = pair(3, 16 * half);
    const __m256 u0 = _mm256_unpacklo_ps(r0, r1), u1 = _mm256_unpackhi_ps(r0, r1);
    const __m256 u2 = _mm256_unpacklo_ps(r2, r3), u3 = _mm256_unpackhi_ps(r2, r3);
    t[4 * half + 0] = _mm256_shuffle_ps(u0, u2, 0x44);
    t[4 * half + 1] = _mm256_shuffle_ps(u0, u2, 0xee);
    t[4 * half + 2] = _mm256_shuffle_ps(u1, u3, 0x44);
    t[4 * half + 3] = _mm256_shuffle_ps(u1, u3, 0xee);
  }
}

// A word of two bf16 numbers, in memory order, as two fp32 numbers.
inline __m256 first_of_pair(__m256 word) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(word), 16));
}
inline __m256 second_of_pair(__m256 word) {
  return _mm256_and_ps(word, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Eight rows of kTransposeStep<kType> contiguous elements: emit(j, lanes) receives element j of
// every row, for j in order.
template <DType kType>
constexpr int kTransposeStep = kType == kBFloat16 ? 16 : 8;

template <DType kType, typename Emit>
inline __attribute__((always_inline)) void transpose_rows(const Element<kType>* p, int64_t stride,
                                                          Emit&& emit) {
  __m256 t[8];
  if constexpr (kType == kFloat16) {
    alignas(32) float wide[8][8];
    for (int row = 0; row < 8; ++row)
      _mm256_store_ps(wide[row], _mm256_cvtph_ps(_mm_loadu_si128(
                                     reinterpret_cast<const __m128i*>(p + row * stride))));
    load_words_transposed(reinterpret_cast<const char*>(wide), sizeof wide[0], t);
  } else {
    load_words_transposed(reinterpret_cast<const char*>(p),
                          stride * static_cast<int64_t>(sizeof(Element<kType>)), t);
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    if constexpr (kType == kBFloat16) {
      emit(2 * j, first_of_pair(t[j]));
      emit(2 * j + 1, second_of_pair(t[j]));
    } else {
      emit(j, t[j]);
    }
  }
}
#endif

// out[r * ld + c] = in[r * stride + c].
template <DType kType>
inline void pack_rows(const Element<kType>* in, int64_t stride, int64_t rows, int64_t columns,
                      float* out, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    const Element<kType>* from = in + r * stride;
    float* to = out + r * ld;
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) store(to + c, load_typed<kType>(from + c));
    for (; c < columns; ++c) to[c] = widen<kType>(from[c]);
  }
}

// out[r * ld + c] = in[c * stride + r].
template <DType kType>
inline void pack_columns(const Element<kType>* in, int64_t stride, int64_t rows, int64_t columns,
                         float* out, int64_t ld) {
  int64_t whole_columns = 0, whole_rows = 0;
#if defined(__AVX2__)
  constexpr int kStep = kTransposeStep<kType>;
  whole_columns = columns & ~int64_t{7};
  whole_rows = rows / kStep * kStep;
  for (int64_t r = 0; r < whole_rows; r += kStep)
    for (int64_t c = 0; c < whole_columns; c += 8)
      transpose_rows<kType>(in + c * stride + r, stride, [&](int j, __m256 lanes) {
        _mm256_storeu_ps(out + (r + j) * ld + c, lanes);
      });
#endif
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c)
      out[r * ld + c] = widen<kType>(in[c * stride + r]);
}

// out[r * ld + c] = in[r * row_stride + c * column_stride], widened to fp32.
inline void pack(const void* in, int64_t row_stride, int64_t column_stride, DType dtype,
                 int64_t rows, int64_t columns, float* out, int64_t ld) {
  with_type(dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const auto* typed = static_cast<const Element<kType>*>(in);
    if (column_stride == 1) {
      pack_rows<kType>(typed, row_stride, rows, columns, out, ld);
    } else if (row_stride == 1) {
      pack_columns<kType>(typed, column_stride, rows, columns, out, ld);
    } else {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c)
          out[r * ld + c] = widen<kType>(typed[r * row_stride + c * column_stride]);
    }
  });
}

}  // namespace lockstep
