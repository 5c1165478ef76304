// What the attention kernels share: where keys lie, how a block of keys is packed, and the one
// product that every step is made of.
//
// Keys are cut into blocks of 64 at absolute positions (64 b .. 64 b + 63). Which query rows meet a
// packed block together, and how rows and columns are tiled, is for speed alone: each element below
// is one sequential chain of fused multiply-adds.
#pragma once

#include <algorithm>

#include "typed.hpp"

namespace lockstep {

constexpr int64_t kBlockKeys = 64;
constexpr int64_t kLargestHeadDim = 256;
constexpr float kZeros[kLargestHeadDim] = {};
// Query rows that go through one product together: as many as fit the registers.
constexpr int kTileRows = 6;

inline int64_t padded(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

// dst[r, c] = (fresh ? 0 : dst[r, c]) + sum over n, in order, of coefficient[r, n] * b[n, c], for
// R rows and 16 G columns. b has leading dimension ldb, dst ldd, coefficient any two strides.
template <int R, int G>
inline void product_tile(const float* coefficient, int64_t row_stride, int64_t step, int64_t count,
                         const float* b, int64_t ldb, float* dst, int64_t ldd, bool fresh) {
  F16 total[R][G];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) total[r][g] = fresh ? zero() : load(dst + r * ldd + g * kLanes);
  for (int64_t n = 0; n < count; ++n) {
    F16 values[G];
    for (int g = 0; g < G; ++g) values[g] = load(b + n * ldb + g * kLanes);
    for (int r = 0; r < R; ++r) {
      const F16 factor = set1(coefficient[r * row_stride + n * step]);
      for (int g = 0; g < G; ++g) total[r][g] = fma(factor, values[g], total[r][g]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) store(dst + r * ldd + g * kLanes, total[r][g]);
}

template <int R>
inline void product_rows(const float* coefficient, int64_t row_stride, int64_t step, int64_t count,
                         const float* b, int64_t ldb, int64_t columns, float* dst, int64_t ldd,
                         bool fresh) {
#if defined(__AVX512F__)
  constexpr int kGroups = R == 1 ? 4 : 2;
#else
  constexpr int kGroups = R == 1 ? 4 : R == 2 ? 2 : 1;
#endif
  int64_t c = 0;
  for (; c + kGroups * kLanes <= columns; c += kGroups * kLanes)
    product_tile<R, kGroups>(coefficient, row_stride, step, count, b + c, ldb, dst + c, ldd, fresh);
  for (; c < columns; c += kLanes)
    product_tile<R, 1>(coefficient, row_stride, step, count, b + c, ldb, dst + c, ldd, fresh);
}

// The product above for up to kTileRows rows; columns is a multiple of 16.
inline void product(int rows, const float* coefficient, int64_t row_stride, int64_t step,
                    int64_t count, const float* b, int64_t ldb, int64_t columns, float* dst,
                    int64_t ldd, bool fresh) {
  const auto run = [&](auto fixed) {
    product_rows<fixed()>(coefficient, row_stride, step, count, b, ldb, columns, dst, ldd, fresh);
  };
  switch (rows) {
    case 1: return run(std::integral_constant<int, 1>{});
    case 2: return run(std::integral_constant<int, 2>{});
    case 3: return run(std::integral_constant<int, 3>{});
    case 4: return run(std::integral_constant<int, 4>{});
    case 5: return run(std::integral_constant<int, 5>{});
    default: return run(std::integral_constant<int, 6>{});
  }
}

// Keys or values of one sequence: rows of a tensor, or rows of pages named by a block table.
template <DType kType>
struct KeySource {
  const Element<kType>* base;
  int64_t block_stride, token_stride, head_stride;
  const int32_t* table;  // null: not paged
  int64_t block_size;
  int64_t first_row;  // of the sequence, when not paged

  const Element<kType>* at(int64_t position, int64_t head) const {
    const Element<kType>* row = base + head * head_stride;
    if (table == nullptr) return row + (first_row + position) * token_stride;
    return row + table[position / block_size] * block_stride +
           (position % block_size) * token_stride;
  }
};

// Addresses of the 64 keys of a block; those at `count` and beyond are a row of zeros.
template <DType kType>
inline void block_rows(const KeySource<kType>& source, int64_t block, int64_t head, int64_t count,
                       const Element<kType>* rows[kBlockKeys]) {
  const auto* zeros = reinterpret_cast<const Element<kType>*>(kZeros);
  for (int64_t j = 0; j < kBlockKeys; ++j)
    rows[j] = j < count ? source.at(block * kBlockKeys + j, head) : zeros;
}

// out [count, ld] = the rows, widened; columns from head_dim to ld are zero.
template <DType kType>
inline void pack_rows(const Element<kType>* const* rows, int64_t count, int64_t head_dim,
                      int64_t ld, float* out) {
  for (int64_t j = 0; j < count; ++j)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(out + j * ld + d, load_typed<kType>(rows[j] + d, head_dim - d));
}

#if defined(__SSE2__)

// Eight 16-bit elements d .. d + 7 of eight rows, as eight columns of fp32.
template <DType kType>
inline void transpose_patch(const uint16_t* const* rows, int64_t d, float* out) {
  __m128i r[8], s[8];
  for (int i = 0; i < 8; ++i)
    r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + d));
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm_unpacklo_epi16(r[i], r[i + 1]);
    s[i + 1] = _mm_unpackhi_epi16(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm_unpacklo_epi32(s[i], s[i + 2]);
    r[i + 1] = _mm_unpackhi_epi32(s[i], s[i + 2]);
    r[i + 2] = _mm_unpacklo_epi32(s[i + 1], s[i + 3]);
    r[i + 3] = _mm_unpackhi_epi32(s[i + 1], s[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    s[2 * i] = _mm_unpacklo_epi64(r[i], r[i + 4]);
    s[2 * i + 1] = _mm_unpackhi_epi64(r[i], r[i + 4]);
  }
  for (int i = 0; i < 8; ++i) {
    float* column = out + i * kBlockKeys;
    if constexpr (kType == kBFloat16) {
      _mm_storeu_ps(column, _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), s[i])));
      _mm_storeu_ps(column + 4, _mm_castsi128_ps(_mm_unpackhi_epi16(_mm_setzero_si128(), s[i])));
    } else {
      uint16_t lanes[8];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), s[i]);
      for (int j = 0; j < 8; ++j) column[j] = widen<kType>(lanes[j]);
    }
  }
}

template <DType kType>
inline void transpose_patch(const float* const* rows, int64_t d, float* out) {
  for (int half = 0; half < 8; half += 4) {
    __m128 a = _mm_loadu_ps(rows[half] + d), b = _mm_loadu_ps(rows[half + 1] + d);
    __m128 c = _mm_loadu_ps(rows[half + 2] + d), e = _mm_loadu_ps(rows[half + 3] + d);
    _MM_TRANSPOSE4_PS(a, b, c, e);
    _mm_storeu_ps(out + half, a);
    _mm_storeu_ps(out + kBlockKeys + half, b);
    _mm_storeu_ps(out + 2 * kBlockKeys + half, c);
    _mm_storeu_ps(out + 3 * kBlockKeys + half, e);
  }
}

#endif

// out [head_dim, 64] = the rows transposed and widened; the columns from `count` rounded up to 16
// onwards are left as they are.
template <DType kType>
inline void pack_transposed(const Element<kType>* const* rows, int64_t count, int64_t head_dim,
                            float* out) {
  for (int64_t j = 0; j < padded(count); j += 8) {
    int64_t d = 0;
#if defined(__SSE2__)
    constexpr int64_t kPatch = kType == kFloat32 ? 4 : 8;
    for (; d + kPatch <= head_dim; d += kPatch)
      transpose_patch<kType>(rows + j, d, out + d * kBlockKeys + j);
#endif
    for (; d < head_dim; ++d)
      for (int64_t i = j; i < j + 8; ++i) out[d * kBlockKeys + i] = widen<kType>(rows[i][d]);
  }
}

// What a query sees besides causality, and how its scores are bent.
struct Masking {
  int64_t window;  // keys p - window < s <= p; no limit: kNoWindow
  float cap;       // scores become cap tanh(score / cap); no cap: 0
};

constexpr int64_t kNoWindow = int64_t{1} << 62;

// The keys [begin, end) of the 64 of a block that a query sees; begin >= end: none.
struct Visible {
  int64_t begin, end;
};

inline Visible visible_keys(int64_t position, int64_t block, int64_t window) {
  const int64_t first = block * kBlockKeys;
  return {std::clamp<int64_t>(position - window + 1 - first, 0, kBlockKeys),
          std::clamp<int64_t>(position + 1 - first, 0, kBlockKeys)};
}

// tanh(x) to a few ulp: an odd polynomial near 0, 1 - 2 / (exp(2 x) + 1) beyond.
inline F16 tanh(F16 x) {
  const F16 z = mul(x, x);
  F16 p = set1(62.0f / 2835.0f);
  p = fma(p, z, set1(-17.0f / 315.0f));
  p = fma(p, z, set1(2.0f / 15.0f));
  p = fma(p, z, set1(-1.0f / 3.0f));
  const F16 near = fma(mul(p, z), x, x);
  const F16 one = set1(1.0f), two = set1(2.0f);
  const F16 far = sub(one, div(two, add(exp(mul(two, x)), one)));
  return where_less(z, set1(0.0625f), near, far);
}

// scale * product, bent by the cap; slope: its derivative by scale * product.
inline F16 bent_score(F16 product, float scale, float cap) {
  const F16 score = mul(product, set1(scale));
  return cap == 0.0f ? score : mul(set1(cap), tanh(div(score, set1(cap))));
}

// dst[r, :] = sum over the keys j that row r sees, in order, of coefficient[r, j] * b[j, :]. Keys
// that a row does not see never enter its chain, not even with weight 0: they may be NaN.
template <typename See>
inline void masked_product(int rows, const float* coefficient, const float* b, int64_t columns,
                           float* dst, See see) {
  int64_t begin = 0, end = kBlockKeys;
  for (int r = 0; r < rows; ++r) {
    begin = std::max(begin, see(r).begin);
    end = std::min(end, see(r).end);
  }
  const auto alone = [&](int r, int64_t from, int64_t to, bool fresh) {
    if (fresh || from < to)
      product(1, coefficient + r * kBlockKeys + from, kBlockKeys, 1, std::max<int64_t>(to - from, 0),
              b + from * columns, columns, columns, dst + r * columns, columns, fresh);
  };
  if (begin >= end) {
    for (int r = 0; r < rows; ++r) alone(r, see(r).begin, see(r).end, true);
    return;
  }
  bool fresh = true;
  for (int r = 0; r < rows; ++r) fresh = fresh && see(r).begin == begin;
  if (!fresh)
    for (int r = 0; r < rows; ++r) alone(r, see(r).begin, begin, true);
  product(rows, coefficient + begin, kBlockKeys, 1, end - begin, b + begin * columns, columns,
          columns, dst, columns, fresh);
  for (int r = 0; r < rows; ++r) alone(r, end, see(r).end, false);
}

}  // namespace lockstep
