// Sixteen fp32 lanes with one meaning on every instruction set.
//
// Every CPU kernel of Lockstep is written in terms of `F16`. One lane is one IEEE-754 fp32
// number; each operation below rounds once, to nearest even, and `fma` is always fused. An
// operation therefore yields the same bits whether the compiler targets AVX-512 (one register),
// AVX2 (two registers) or plain C++ (an array), so the instruction set is not part of the
// numerics contract. The sources must be compiled with -ffp-contract=off: the fusion is explicit.
//
// Order of reduction: `sum` and `max` fold the lanes by a fixed binary tree (i with i + 8, then
// + 4, + 2, + 1). A row wider than 16 is first folded into lanes by index modulo 16, in order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
// False alarms inside the AVX-512 headers of GCC 12.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace lockstep {

constexpr int kLanes = 16;

// Element types of tensors that cross the C boundary; the values are mirrored in library.py.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline float bf16_to_float(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

#if defined(__F16C__)
inline float f16_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_f16(float value) {
  return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
inline float f16_to_float(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}
inline uint16_t float_to_f16(float value) {
  _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}
#endif

#if defined(__AVX512F__)

struct F16 { __m512 v; };

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a > b ? a : b, lane by lane; a NaN in either operand yields b, as max_ps does everywhere.
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 round_even(F16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a < b ? x : y, lane by lane; an unordered comparison yields y.
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// a is NaN ? x : y, lane by lane.
inline F16 where_nan(F16 a, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), y.v, x.v)};
}
// 2^n for integral n in [-126, 127], lane by lane.
inline F16 exp2_integer(F16 n) {
  __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}

#elif defined(__AVX2__)

struct F16 { __m256 lo, hi; };

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
inline __m256 widen_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F16 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline F16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 round_even(F16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline F16 where_nan(F16 a, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}
inline __m256 exp2_integer(__m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline F16 exp2_integer(F16 n) { return {exp2_integer(n.lo), exp2_integer(n.hi)}; }

#else

struct F16 { float v[kLanes]; };

#define LOCKSTEP_LANEWISE(expression) \
  F16 r;                              \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r

inline F16 zero() { LOCKSTEP_LANEWISE(0.0f); }
inline F16 set1(float x) { LOCKSTEP_LANEWISE(x); }
inline F16 load(const float* p) { LOCKSTEP_LANEWISE(p[i]); }
inline void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 load_bf16(const uint16_t* p) { LOCKSTEP_LANEWISE(bf16_to_float(p[i])); }
inline F16 load_f16(const uint16_t* p) { LOCKSTEP_LANEWISE(f16_to_float(p[i])); }
inline F16 fma(F16 a, F16 b, F16 c) { LOCKSTEP_LANEWISE(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F16 add(F16 a, F16 b) { LOCKSTEP_LANEWISE(a.v[i] + b.v[i]); }
inline F16 sub(F16 a, F16 b) { LOCKSTEP_LANEWISE(a.v[i] - b.v[i]); }
inline F16 mul(F16 a, F16 b) { LOCKSTEP_LANEWISE(a.v[i] * b.v[i]); }
inline F16 div(F16 a, F16 b) { LOCKSTEP_LANEWISE(a.v[i] / b.v[i]); }
inline F16 max(F16 a, F16 b) { LOCKSTEP_LANEWISE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F16 min(F16 a, F16 b) { LOCKSTEP_LANEWISE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F16 round_even(F16 a) { LOCKSTEP_LANEWISE(__builtin_rintf(a.v[i])); }
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) {
  LOCKSTEP_LANEWISE(a.v[i] < b.v[i] ? x.v[i] : y.v[i]);
}
inline F16 where_nan(F16 a, F16 x, F16 y) { LOCKSTEP_LANEWISE(a.v[i] != a.v[i] ? x.v[i] : y.v[i]); }
inline F16 exp2_integer(F16 n) {
  F16 r;
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
    std::memcpy(&r.v[i], &bits, sizeof bits);
  }
  return r;
}

#undef LOCKSTEP_LANEWISE

#endif

#if defined(__AVX2__)

// Eight lanes rounded like float_to_bf16, in the low halves of eight 32-bit integers.
inline __m256i round_to_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}

inline void store_bf16(uint16_t* p, __m256 lo, __m256 hi) {
  // The pack interleaves 128-bit halves; the permutation puts them in order.
  const __m256i packed = _mm256_packus_epi32(round_to_bf16(lo), round_to_bf16(hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

#if defined(__AVX512F__)
inline void store_bf16(uint16_t* p, F16 a) {
  store_bf16(p, _mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
inline void store_f16(uint16_t* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
inline void store_bf16(uint16_t* p, F16 a) { store_bf16(p, a.lo, a.hi); }
inline void store_f16(uint16_t* p, F16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, kNearest));
}
#endif

#else

inline void store_bf16(uint16_t* p, F16 a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(lanes[i]);
}

inline void store_f16(uint16_t* p, F16 a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_f16(lanes[i]);
}

#endif

inline float sum(F16 a) {
  float v[kLanes];
  store(v, a);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
  return v[0];
}

inline float max(F16 a) {
  float v[kLanes];
  store(v, a);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}

// exp(x) to within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a degree-6 polynomial in r (minimax
// coefficients of the Cephes library), 2^n by its exponent bits. Results below 2^-126 are 0,
// above the range +inf; exp(-inf) = 0 and NaN stays NaN.
inline F16 exp(F16 x) {
  const F16 n = round_even(mul(min(max(set1(-88.0f), x), set1(89.0f)), set1(1.44269504088896341f)));
  F16 r = fma(n, set1(-0.693359375f), min(max(set1(-88.0f), x), set1(89.0f)));
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  // n may reach 128; split the power so that neither factor leaves the normal range.
  const F16 half = round_even(mul(n, set1(0.5f)));
  F16 y = mul(mul(p, exp2_integer(half)), exp2_integer(sub(n, half)));
  y = where_less(x, set1(-87.336544f), zero(), y);
  y = where_less(set1(88.722839f), x, set1(std::numeric_limits<float>::infinity()), y);
  return where_nan(x, x, y);
}

// ln(x) to within 2 ulp: x = m 2^e with m in [sqrt(1/2), sqrt(2)), a degree-8 polynomial in m - 1
// (minimax coefficients of the Cephes library). ln(0) = -inf, ln(x < 0) = NaN, subnormals exact.
inline F16 log(F16 x) {
  const F16 smallest = set1(1.17549435e-38f);
  const F16 scaled = where_less(x, smallest, mul(x, set1(8388608.0f)), x);
  float in[kLanes], mantissas[kLanes], exponents[kLanes];
  store(in, scaled);
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &in[i], sizeof bits);
    bits += 0x3f800000u - 0x3f3504f3u;
    exponents[i] = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
    bits = (bits & 0x007fffffu) + 0x3f3504f3u;
    std::memcpy(&mantissas[i], &bits, sizeof bits);
  }
  const F16 e = add(load(exponents), where_less(x, smallest, set1(-23.0f), zero()));
  const F16 f = sub(load(mantissas), set1(1.0f));
  const F16 z = mul(f, f);
  F16 p = set1(7.0376836292e-2f);
  p = fma(p, f, set1(-1.1514610310e-1f));
  p = fma(p, f, set1(1.1676998740e-1f));
  p = fma(p, f, set1(-1.2420140846e-1f));
  p = fma(p, f, set1(1.4249322787e-1f));
  p = fma(p, f, set1(-1.6668057665e-1f));
  p = fma(p, f, set1(2.0000714765e-1f));
  p = fma(p, f, set1(-2.4999993993e-1f));
  p = fma(p, f, set1(3.3333331174e-1f));
  F16 y = mul(mul(p, f), z);
  y = fma(e, set1(-2.12194440e-4f), y);
  y = fma(z, set1(-0.5f), y);
  y = add(f, y);
  y = fma(e, set1(0.693359375f), y);
  const F16 infinity = set1(std::numeric_limits<float>::infinity());
  y = where_less(x, infinity, y, infinity);
  y = where_less(zero(), x, y, set1(-std::numeric_limits<float>::infinity()));
  // Infinity times x - x is NaN at run time: a NaN constant makes GCC 12 fail while folding.
  y = where_less(x, zero(), mul(infinity, sub(x, x)), y);
  return where_nan(x, x, y);
}

inline float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

inline float log(float x) {
  float lanes[kLanes];
  store(lanes, log(set1(x)));
  return lanes[0];
}

// The first `count` lanes from memory, the rest `fill`.
inline F16 load_partial(const float* p, int count, float fill = 0.0f) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : fill;
  return load(lanes);
}

inline F16 load_any(const void* base, int64_t index, DType dtype) {
  if (dtype == kBFloat16) return load_bf16(static_cast<const uint16_t*>(base) + index);
  if (dtype == kFloat16) return load_f16(static_cast<const uint16_t*>(base) + index);
  return load(static_cast<const float*>(base) + index);
}

inline float load_scalar(const void* base, int64_t index, DType dtype) {
  if (dtype == kBFloat16) return bf16_to_float(static_cast<const uint16_t*>(base)[index]);
  if (dtype == kFloat16) return f16_to_float(static_cast<const uint16_t*>(base)[index]);
  return static_cast<const float*>(base)[index];
}

inline void store_scalar(void* base, int64_t index, DType dtype, float value) {
  if (dtype == kBFloat16) static_cast<uint16_t*>(base)[index] = float_to_bf16(value);
  else if (dtype == kFloat16) static_cast<uint16_t*>(base)[index] = float_to_f16(value);
  else static_cast<float*>(base)[index] = value;
}

inline F16 load_any_partial(const void* base, int64_t index, DType dtype, int count,
                            float fill = 0.0f) {
  if (count >= kLanes) return load_any(base, index, dtype);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? load_scalar(base, index + i, dtype) : fill;
  return load(lanes);
}

inline void store_any_partial(void* base, int64_t index, DType dtype, F16 a, int count) {
  if (count >= kLanes) {
    if (dtype == kBFloat16) store_bf16(static_cast<uint16_t*>(base) + index, a);
    else if (dtype == kFloat16) store_f16(static_cast<uint16_t*>(base) + index, a);
    else store(static_cast<float*>(base) + index, a);
    return;
  }
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < count; ++i) store_scalar(base, index + i, dtype, lanes[i]);
}

}  // namespace lockstep
