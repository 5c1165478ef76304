// A per-thread workspace that grows to the largest request and is then reused, so that a call
// does not pay for fresh pages. Its content carries nothing from one call to the next.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace lockstep {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // Uninitialised room for `count` fp32 numbers, aligned to a cache line; null when there is none.
  float* reserve(int64_t count) {
    if (count <= capacity_) return data_;
    std::free(data_);
    const auto bytes = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
    data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
    capacity_ = data_ == nullptr ? 0 : count;
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace lockstep
