// softmax or log_softmax of one row: what the op of that name and the router share.
#pragma once

#include "typed.hpp"

namespace lockstep {

template <DType kType>
inline void softmax_row(const Element<kType>* x, float* out, int64_t width, bool logarithm) {
  const float lowest = -std::numeric_limits<float>::infinity();
  F16 peaks = set1(lowest);
  for (int64_t i = 0; i < width; i += kLanes)
    peaks = max(load_typed<kType>(x + i, width - i, lowest), peaks);
  const F16 peak = set1(max(peaks));
  F16 lanes = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    const F16 shifted = sub(load_typed<kType>(x + i, count, lowest), peak);
    F16 power = exp(shifted);
    if (count < kLanes) {
      float kept[kLanes];
      store(kept, power);
      power = load_partial(kept, static_cast<int>(count));
    }
    lanes = add(lanes, power);
    store_typed<kFloat32>(out + i, logarithm ? shifted : power, count);
  }
  const float total = sum(lanes);
  const F16 divisor = set1(total), log_total = set1(logarithm ? log(total) : 0.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    const F16 value = load_typed<kFloat32>(out + i, width - i);
    store_typed<kFloat32>(out + i, logarithm ? sub(value, log_total) : div(value, divisor),
                          width - i);
  }
}

}  // namespace lockstep
