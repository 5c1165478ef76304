// Quantisation to MXFP4 and MXFP8 and back. One path yields codes and quantised-dequantised values,
// so the two cannot disagree.
#include "microscaling.hpp"

#include <atomic>

using namespace lockstep;

namespace {

// Blocks that one thread takes at a time.
constexpr int64_t kRun = 256;

// fp32 bits of 32 elements, first rounded to `source`; returns the largest magnitude.
template <DType kType>
uint32_t load_block(const Element<kType>* in, DType source, uint32_t* bits) {
  if constexpr (kType == kBFloat16) {
    for (int i = 0; i < kBlock; ++i) bits[i] = static_cast<uint32_t>(in[i]) << 16;
  } else {
    std::memcpy(bits, in, kBlock * sizeof *in);
    if (source == kBFloat16) {
      for (int i = 0; i < kBlock; ++i) {
        const uint32_t magnitude = bits[i] & kMagnitude;
        // Saturating: a NaN must not wrap round to a small number.
        const uint32_t rounded =
            std::min(magnitude, kInfinity) + 0x7fffu + ((magnitude >> 16) & 1u);
        bits[i] = (bits[i] & ~kMagnitude) | (rounded & 0xffff0000u);
      }
    }
  }
  uint32_t largest = 0;
  for (int i = 0; i < kBlock; ++i) largest = std::max(largest, bits[i] & kMagnitude);
  return largest;
}

template <DType kType>
void store_block(const uint32_t* bits, Element<kType>* out) {
  if constexpr (kType == kBFloat16) {
    for (int i = 0; i < kBlock; ++i) out[i] = static_cast<uint16_t>(bits[i] >> 16);
  } else {
    std::memcpy(out, bits, kBlock * sizeof *out);
  }
}

void report(std::atomic<int64_t>& fault, int64_t block) {
  int64_t known = fault.load(std::memory_order_relaxed);
  while ((known < 0 || block < known) && !fault.compare_exchange_weak(known, block)) {
  }
}

template <typename Format, DType kType, DType kOut>
void quantise(const void* x, DType source, int64_t blocks, uint32_t carry, const uint8_t* given,
              uint8_t* packed, uint8_t* scales, void* out, std::atomic<int64_t>& fault,
              int32_t threads) {
  const auto* in = static_cast<const Element<kType>*>(x);
  auto* values = static_cast<Element<kOut>*>(out);
  const int64_t runs = (blocks + kRun - 1) / kRun;
  parallel_for(team_size(threads, blocks, 4 * kRun), runs, [&](int64_t run) {
    alignas(64) uint32_t bits[kBlock], codes[kBlock];
    const int64_t end = std::min(blocks, (run + 1) * kRun);
    for (int64_t block = run * kRun; block < end; ++block) {
      const uint32_t largest = load_block<kType>(in + block * kBlock, source, bits);
      if (largest >= kInfinity) {
        report(fault, block);
        continue;
      }
      int byte = given != nullptr ? given[block] : scale_byte<Format>(largest, carry);
      if (byte == 255) {
        report(fault, block);
        continue;
      }
      if (Format::encode(bits, byte, codes) == 0) {
        // The one canonical zero block: no negative zeros, the lowest scale.
        std::fill_n(codes, kBlock, 0u);
        if (given == nullptr) byte = Format::kFirstScale;
      }
      if (packed != nullptr) Format::pack(codes, packed + block * Format::kBytes);
      if (scales != nullptr) scales[block] = static_cast<uint8_t>(byte);
      if (values != nullptr) {
        Format::decode(codes, byte, bits);
        store_block<kOut>(bits, values + block * kBlock);
      }
    }
  });
}

template <typename Format, DType kOut>
void dequantise(const uint8_t* packed, const uint8_t* scales, int64_t blocks, void* out,
                std::atomic<int64_t>& fault, int32_t threads) {
  auto* values = static_cast<Element<kOut>*>(out);
  const int64_t runs = (blocks + kRun - 1) / kRun;
  parallel_for(team_size(threads, blocks, 4 * kRun), runs, [&](int64_t run) {
    alignas(64) uint32_t bits[kBlock], codes[kBlock];
    const int64_t end = std::min(blocks, (run + 1) * kRun);
    for (int64_t block = run * kRun; block < end; ++block) {
      const int byte = scales[block];
      Format::unpack(packed + block * Format::kBytes, codes);
      if (byte == 255 || !Format::readable(codes)) {
        report(fault, block);
        continue;
      }
      Format::decode(codes, byte, bits);
      uint32_t largest = 0, used = 0;
      for (int i = 0; i < kBlock; ++i) {
        largest = std::max(largest, bits[i] & kMagnitude);
        used |= bits[i];
      }
      if (largest >= kInfinity || (kOut == kBFloat16 && (used & 0xffffu) != 0)) {
        report(fault, block);
        continue;
      }
      store_block<kOut>(bits, values + block * kBlock);
    }
  });
}

// Calls body(std::integral_constant<DType, dtype>) for fp32 and bf16.
template <typename Body>
void with_wide_type(int32_t dtype, Body&& body) {
  if (dtype == kBFloat16) body(std::integral_constant<DType, kBFloat16>{});
  else body(std::integral_constant<DType, kFloat32>{});
}

template <typename Body>
void with_format(int32_t format, Body&& body) {
  if (format == 8) body(MXFP8{});
  else body(MXFP4{});
}

}  // namespace

// Quantises `blocks` consecutive blocks of 32. format: 4 or 8. `given`: scale bytes to use, or null
// to choose them by `carry`. packed, scales, out: results, each may be null. *fault: -1, or the
// first block that holds NaN or infinity (also after rounding to `source`) or a given byte 255.
LOCKSTEP_API int32_t lockstep_microscaling_quantise(
    int32_t format, const void* x, int32_t dtype, int32_t source, int64_t blocks, int64_t carry,
    const uint8_t* given, uint8_t* packed, uint8_t* scales, void* out, int32_t out_dtype,
    int64_t* fault, int32_t threads) {
  return guarded([&] {
    std::atomic<int64_t> first{-1};
    with_format(format, [&](auto kind) {
      with_wide_type(dtype, [&](auto type) {
        with_wide_type(out_dtype, [&](auto out_type) {
          quantise<decltype(kind), type(), out_type()>(
              x, static_cast<DType>(source), blocks, static_cast<uint32_t>(carry), given, packed,
              scales, out, first, threads);
        });
      });
    });
    *fault = first;
  });
}

// The way back. *fault: -1, or the first block with scale byte 255, a NaN code, or a value that
// `out_dtype` does not hold exactly.
LOCKSTEP_API int32_t lockstep_microscaling_dequantise(
    int32_t format, const uint8_t* packed, const uint8_t* scales, int64_t blocks, void* out,
    int32_t out_dtype, int64_t* fault, int32_t threads) {
  return guarded([&] {
    std::atomic<int64_t> first{-1};
    with_format(format, [&](auto kind) {
      with_wide_type(out_dtype, [&](auto out_type) {
        dequantise<decltype(kind), out_type()>(packed, scales, blocks, out, first, threads);
      });
    });
    *fault = first;
  });
}
