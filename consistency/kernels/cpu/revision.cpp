// What library.py asks a freshly loaded library: does it fit this package, and what can the
// processor run?
#include "typed.hpp"


namespace {
constexpr int32_t kRevision = 5;
}

LOCKSTEP_API int32_t lockstep_revision() { return kRevision; }

// 0: anything; 1: AVX2, FMA and F16C; 2: AVX-512 F, BW, VL and DQ as well. The checks include
// that the operating system saves the wide registers.
LOCKSTEP_API int32_t lockstep_processor_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return v3 ? (v4 ? 2 : 1) : 0;
#else
  return 0;
#endif
}
