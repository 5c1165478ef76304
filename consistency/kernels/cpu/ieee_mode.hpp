// A scope in which this thread computes with subnormal numbers and rounds to nearest even.
//
// torch.set_flush_denormal changes the calling thread alone, so without this scope a result could
// depend on which thread computed it. Every parallel region of the kernels opens one.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lockstep {

class IeeeMode {
 public:
#if defined(__x86_64__)
  // 0x1f80: all exceptions masked, round to nearest even, no flush to zero.
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }
  ~IeeeMode() { _mm_setcsr(saved_); }
#else
  IeeeMode() = default;
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;

#if defined(__x86_64__)
 private:
  unsigned int saved_;
#endif
};

}  // namespace lockstep
