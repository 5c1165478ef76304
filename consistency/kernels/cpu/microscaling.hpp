// Blocks of 32 numbers that share one power-of-two scale (OCP Microscaling), in integers alone.
//
// Everything here works on the bits of fp32: a comparison of magnitudes is one of integers, a power
// of two is an exponent field. No rounding mode, no library function and no instruction set enters.
#pragma once

#include <algorithm>
#include <array>

#include "typed.hpp"

namespace lockstep {

constexpr int kBlock = 32;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;

// The fp32 bits of m 2^e, for 0 <= m < 2^24 and results that fp32 holds exactly; +inf above its
// range.
constexpr uint32_t bits_of(uint32_t m, int e) {
  if (m == 0) return 0;
  int high = 0;
  while ((m >> high) > 1) ++high;
  const int exponent = high + e + 127;
  if (exponent >= 255) return kInfinity;
  if (exponent >= 1)
    return (static_cast<uint32_t>(exponent) << 23) | ((m << (23 - high)) & 0x7fffffu);
  return m << (e + 149);
}

// E2M1: codes 0..7 are these multiples of 1/2, bit 3 is the sign.
constexpr std::array<uint32_t, 8> kHalves = {0, 1, 2, 3, 4, 6, 8, 12};
// Midpoints between neighbours, in quarters.
constexpr std::array<uint32_t, 7> kMidpoints = {1, 3, 5, 7, 10, 14, 20};

// For one scale byte: the magnitude of every code, and the least fp32 magnitude that is rounded to
// each code above 0. A tie goes to the even code, so below an odd code the midpoint is not enough.
struct E2M1Row {
  std::array<uint32_t, 8> values;
  std::array<uint32_t, 7> least;
};

constexpr E2M1Row e2m1_row(int byte) {
  E2M1Row row{};
  for (int code = 0; code < 8; ++code) row.values[code] = bits_of(kHalves[code], byte - 128);
  for (int code = 1; code < 8; ++code)
    row.least[code - 1] = bits_of(kMidpoints[code - 1], byte - 129) + (code & 1);
  return row;
}

struct E2M1Table {
  std::array<E2M1Row, 255> rows;
};

constexpr E2M1Table e2m1_table() {
  E2M1Table table{};
  for (int byte = 0; byte < 255; ++byte) table.rows[byte] = e2m1_row(byte);
  return table;
}

inline constexpr E2M1Table kE2M1 = e2m1_table();

struct MXFP4 {
  static constexpr int kLargestExponent = 2;
  // Between these scales every value is a normal bf16 number, or zero.
  static constexpr int kFirstScale = 2, kLastScale = 252;
  static constexpr int kBytes = kBlock / 2;

  // Codes of 32 magnitudes and signs (fp32 bits) under a scale; returns the union of the codes'
  // magnitudes.
  static uint32_t encode(const uint32_t* bits, int byte, uint32_t* codes) {
    const E2M1Row& row = kE2M1.rows[byte];
    uint32_t any = 0;
    for (int i = 0; i < kBlock; ++i) {
      const auto magnitude = static_cast<int32_t>(bits[i] & kMagnitude);
      uint32_t code = 0;
#pragma GCC unroll 7
      for (int step = 0; step < 7; ++step)
        code += magnitude >= static_cast<int32_t>(row.least[step]);
      any |= code;
      codes[i] = code | ((bits[i] >> 28) & 8u);
    }
    return any;
  }

  static void decode(const uint32_t* codes, int byte, uint32_t* bits) {
    if (byte < kFirstScale || byte > kLastScale) {
      const E2M1Row& row = kE2M1.rows[byte];
      for (int i = 0; i < kBlock; ++i)
        bits[i] = row.values[codes[i] & 7u] | ((codes[i] & 8u) << 28);
      return;
    }
    // Codes from 2 on are floating-point numbers with one bit of mantissa; 1 is half a scale.
    const uint32_t half = static_cast<uint32_t>(byte - 1) << 23;
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t code = codes[i] & 7u;
      const uint32_t value = code == 0 ? 0u : half + (code == 1 ? 0u : code << 22);
      bits[i] = value | ((codes[i] & 8u) << 28);
    }
  }

  static void pack(const uint32_t* codes, uint8_t* out) {
    for (int i = 0; i < kBytes; ++i)
      out[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
  }

  static void unpack(const uint8_t* in, uint32_t* codes) {
    for (int i = 0; i < kBytes; ++i) {
      codes[2 * i] = in[i] & 15u;
      codes[2 * i + 1] = in[i] >> 4;
    }
  }

  static bool readable(const uint32_t*) { return true; }
};

// E4M3 (the variant without infinity): 448 is the largest value, 0x7f and 0xff are NaN.
struct MXFP8 {
  static constexpr int kLargestExponent = 8;
  static constexpr int kFirstScale = 10, kLastScale = 246;
  static constexpr int kBytes = kBlock;

  static uint32_t encode(const uint32_t* bits, int byte, uint32_t* codes) {
    uint32_t any = 0;
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t magnitude = bits[i] & kMagnitude;
      const auto field = static_cast<int32_t>(magnitude >> 23);
      const int32_t exponent = field == 0 ? 1 : field;
      const uint32_t significand =
          field == 0 ? magnitude : (magnitude & 0x7fffffu) | 0x800000u;
      // Below 2^-6 the step between neighbours stays 2^-9.
      const int32_t below = byte - 6 - exponent;
      const int32_t shift = 20 + std::min(std::max(below, 0), 6);
      const uint32_t odd = (significand >> shift) & 1u;
      const uint32_t rounded = (significand + (1u << (shift - 1)) - 1u + odd) >> shift;
      const uint32_t code = (static_cast<uint32_t>(std::max(-below, 0)) << 3) + rounded;
      const uint32_t kept = std::min(code, 0x7eu);
      any |= kept;
      codes[i] = kept | ((bits[i] >> 24) & 0x80u);
    }
    return any;
  }

  static void decode(const uint32_t* codes, int byte, uint32_t* bits) {
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t field = (codes[i] >> 3) & 15u, mantissa = codes[i] & 7u;
      const uint32_t significand = field == 0 ? mantissa : mantissa | 8u;
      const int exponent = static_cast<int>(field == 0 ? 1u : field) - 10;
      bits[i] = bits_of(significand, exponent + byte - 127) | ((codes[i] & 0x80u) << 24);
    }
  }

  static void pack(const uint32_t* codes, uint8_t* out) {
    for (int i = 0; i < kBlock; ++i) out[i] = static_cast<uint8_t>(codes[i]);
  }

  static void unpack(const uint8_t* in, uint32_t* codes) {
    for (int i = 0; i < kBlock; ++i) codes[i] = in[i];
  }

  static bool readable(const uint32_t* codes) {
    uint32_t nan = 0;
    for (int i = 0; i < kBlock; ++i) nan |= (codes[i] & 0x7fu) == 0x7fu;
    return nan == 0;
  }
};

// The scale byte of a block whose largest magnitude has these fp32 bits. `carry` is the scale rule:
// what is added to the mantissa before the exponent is read.
template <typename Format>
inline int scale_byte(uint32_t largest, uint32_t carry) {
  const auto byte =
      static_cast<int32_t>((largest + carry) >> 23) - Format::kLargestExponent;
  return std::clamp<int32_t>(byte, Format::kFirstScale, Format::kLastScale);
}

}  // namespace lockstep
