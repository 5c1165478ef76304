// The permutation of a mixture-of-experts layer: sort tokens by expert, copy them there, combine.
//
// No atomics. The sort is stable; the outputs of a token's experts are combined in slot order in
// fp32 and rounded once; dot products fold by index modulo 16.
#include <cstring>
#include <vector>

#include "typed.hpp"

using namespace lockstep;

// Stable counting sort of the pairs (token, slot) by expert. offsets [experts + 1]; place [pairs]:
// the sorted position of each pair. *fault: -1, or the first pair whose id is out of range.
LOCKSTEP_API int32_t lockstep_expert_sort(
    const int64_t* ids, int64_t pairs, int64_t experts, int64_t* offsets, int64_t* place,
    int64_t* fault) {
  return guarded([&] {
    *fault = -1;
    std::fill(offsets, offsets + experts + 1, 0);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (ids[pair] < 0 || ids[pair] >= experts) return void(*fault = pair);
      ++offsets[ids[pair] + 1];
    }
    for (int64_t expert = 0; expert < experts; ++expert) offsets[expert + 1] += offsets[expert];
    std::vector<int64_t> next(offsets, offsets + experts);
    for (int64_t pair = 0; pair < pairs; ++pair) place[pair] = next[ids[pair]]++;
  });
}

// out[place[t * k + s]] = x[t], bytes as they are.
LOCKSTEP_API int32_t lockstep_expert_dispatch(
    const char* x, const int64_t* place, char* out, int64_t tokens, int64_t k, int64_t row_bytes,
    int32_t threads) {
  return guarded([&] {
    parallel_for(team_size(threads, tokens * k * row_bytes), tokens, [&](int64_t token) {
      for (int64_t slot = 0; slot < k; ++slot)
        std::memcpy(out + place[token * k + slot] * row_bytes, x + token * row_bytes, row_bytes);
    });
  });
}

// out[t] = sum over slots s, in order, of weights[t, s] * y[place[t * k + s]]; without weights
// (null) the plain sum.
LOCKSTEP_API int32_t lockstep_expert_combine(
    const void* y, int32_t dtype, const int64_t* place, const float* weights, void* out,
    int32_t out_dtype, int64_t tokens, int64_t k, int64_t width, int32_t threads) {
  return guarded([&] {
    with_type(dtype, [&](auto type) {
      with_type(out_dtype, [&](auto out_type) {
        const auto* rows = static_cast<const Element<type()>*>(y);
        auto* result = static_cast<Element<out_type()>*>(out);
        const int team = team_size(threads, tokens * k * width);
        parallel_for(team, tokens, [&](int64_t token) {
          for (int64_t i = 0; i < width; i += kLanes) {
            F16 total = zero();
            for (int64_t slot = 0; slot < k; ++slot) {
              const int64_t pair = token * k + slot;
              const F16 value = load_typed<type()>(rows + place[pair] * width + i, width - i);
              total = weights == nullptr ? add(total, value)
                                       : fma(set1(weights[pair]), value, total);
            }
            store_typed<out_type()>(result + token * width + i, total, width - i);
          }
        });
      });
    });
  });
}

// grad_y[place[t * k + s]] = weights[t, s] grad[t]; grad_weights[t, s] = grad[t] . y[place], each
// dot product folded as one row.
LOCKSTEP_API int32_t lockstep_expert_combine_backward(
    const void* grad, int32_t grad_dtype, const void* y, int32_t dtype, const int64_t* place,
    const float* weights, void* grad_y, float* grad_weights, int64_t tokens, int64_t k,
    int64_t width, int32_t threads) {
  return guarded([&] {
    with_type(dtype, [&](auto type) {
      with_type(grad_dtype, [&](auto grad_type) {
        const int team = team_size(threads, tokens * k * width);
        parallel_for(team, tokens, [&](int64_t token) {
          for (int64_t slot = 0; slot < k; ++slot) {
            const int64_t pair = token * k + slot;
            const auto* outer = static_cast<const Element<grad_type()>*>(grad) + token * width;
            const auto* row = static_cast<const Element<type()>*>(y) + place[pair] * width;
            auto* result = static_cast<Element<type()>*>(grad_y) + place[pair] * width;
            const F16 weight = set1(weights[pair]);
            F16 lanes = zero();
            for (int64_t i = 0; i < width; i += kLanes) {
              const F16 g = load_typed<grad_type()>(outer + i, width - i);
              lanes = fma(g, load_typed<type()>(row + i, width - i), lanes);
              store_typed<type()>(result + i, mul(weight, g), width - i);
            }
            grad_weights[pair] = sum(lanes);
          }
        });
      });
    });
  });
}
