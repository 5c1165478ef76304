// Element types as template parameters, so that inner loops carry no branch on the dtype.
#pragma once

#include <omp.h>

#include <algorithm>
#include <new>
#include <type_traits>

#include "ieee_mode.hpp"
#include "simd.hpp"

#ifndef LOCKSTEP_API
#define LOCKSTEP_API extern "C" __attribute__((visibility("default")))
#endif

namespace lockstep {

// Runs body(); the status that every exported function returns: 0 done, 1 out of memory. Code
// inside OpenMP regions must not allocate, because an exception cannot leave such a region.
template <typename Body>
inline int32_t guarded(Body&& body) {
  const IeeeMode mode;
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

template <DType kType>
using Element = std::conditional_t<kType == kFloat32, float, uint16_t>;

template <DType kType>
inline F16 load_typed(const Element<kType>* p) {
  if constexpr (kType == kBFloat16) return load_bf16(p);
  else if constexpr (kType == kFloat16) return load_f16(p);
  else return load(p);
}

template <DType kType>
inline float widen(Element<kType> value) {
  if constexpr (kType == kBFloat16) return bf16_to_float(value);
  else if constexpr (kType == kFloat16) return f16_to_float(value);
  else return value;
}

template <DType kType>
inline Element<kType> narrow(float value) {
  if constexpr (kType == kBFloat16) return float_to_bf16(value);
  else if constexpr (kType == kFloat16) return float_to_f16(value);
  else return value;
}

// The first min(count, 16) elements; the remaining lanes hold `fill`.
template <DType kType>
inline F16 load_typed(const Element<kType>* p, int64_t count, float fill = 0.0f) {
  if (count >= kLanes) return load_typed<kType>(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? widen<kType>(p[i]) : fill;
  return load(lanes);
}

template <DType kType>
inline void store_typed(Element<kType>* p, F16 a, int64_t count) {
  if (count >= kLanes) {
    if constexpr (kType == kBFloat16) store_bf16(p, a);
    else if constexpr (kType == kFloat16) store_f16(p, a);
    else store(p, a);
    return;
  }
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < count; ++i) p[i] = narrow<kType>(lanes[i]);
}

// Calls body(std::integral_constant<DType, dtype>).
template <typename Body>
inline void with_type(int32_t dtype, Body&& body) {
  if (dtype == kBFloat16) body(std::integral_constant<DType, kBFloat16>{});
  else if (dtype == kFloat16) body(std::integral_constant<DType, kFloat16>{});
  else body(std::integral_constant<DType, kFloat32>{});
}

// Threads worth starting for `work` elementary operations: one per `grain` of them.
inline int team_size(int threads, int64_t work, int64_t grain = 32768) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, work / grain)));
}

// Calls body(i) for i in [0, count), split evenly over `team` threads.
template <typename Body>
inline void parallel_for(int team, int64_t count, Body&& body) {
  if (team == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel num_threads(team)
  {
    const IeeeMode mode;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; ++i) body(i);
  }
}

// Calls body(i, thread) for i in [0, count); a free thread takes the next i.
template <typename Body>
inline void parallel_items(int team, int64_t count, Body&& body) {
  if (team == 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
#pragma omp parallel num_threads(team)
  {
    const IeeeMode mode;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
  }
}

}  // namespace lockstep
