// Expert routing: top-k, the router's softmax with gathered weights, and the MoE permutation.
//
// Nothing here uses atomics. Ties go to the lowest index; tokens are sorted by a stable counting
// sort; the outputs of a token's experts are combined in slot order in fp32 and rounded once.
#include <cstring>
#include <utility>
#include <vector>

#include "typed.hpp"

namespace lockstep {
namespace {

// Up to this k a row is scanned once with insertion into the k best; above it is sorted.
constexpr int64_t kInsertionLimit = 64;

using Scored = std::pair<float, int64_t>;

bool better(const Scored& a, const Scored& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// The k best of a row, best first; `better` is a total order, so the answer is unique.
void top_k_row(const float* scores, int64_t width, int64_t k, float* values, int64_t* ids,
               Scored* scratch) {
  if (k > kInsertionLimit) {
    for (int64_t i = 0; i < width; ++i) scratch[i] = {scores[i], i};
    std::partial_sort(scratch, scratch + k, scratch + width, better);
    for (int64_t i = 0; i < k; ++i) values[i] = scratch[i].first, ids[i] = scratch[i].second;
    return;
  }
  int64_t filled = 0;
  for (int64_t i = 0; i < width; ++i) {
    if (filled == k && !(scores[i] > values[k - 1])) continue;
    int64_t place = filled < k ? filled++ : k - 1;
    for (; place > 0 && scores[i] > values[place - 1]; --place)
      values[place] = values[place - 1], ids[place] = ids[place - 1];
    values[place] = scores[i], ids[place] = i;
  }
}

int64_t first_row_with_nan(const float* values, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    F16 seen = zero();
    for (int64_t i = 0; i < width; i += kLanes)
      seen = where_nan(load_typed<kFloat32>(values + row * width + i, width - i), set1(1.0f), seen);
    if (max(seen) > 0.0f) return row;
  }
  return -1;
}

// Gradient of the gathered weights with respect to one row of router logits.
void route_row_gradient(const float* grad, const float* probabilities, const int64_t* ids,
                        float* out, int64_t experts, int64_t k, bool normalise) {
  std::fill(out, out + experts, 0.0f);
  float selected = 1.0f, projection = 0.0f;
  if (normalise) {
    selected = 0.0f;
    for (int64_t i = 0; i < k; ++i) selected = selected + probabilities[ids[i]];
    for (int64_t i = 0; i < k; ++i)
      projection = __builtin_fmaf(grad[i], probabilities[ids[i]] / selected, projection);
  }
  float total = 0.0f;
  for (int64_t i = 0; i < k; ++i) {
    out[ids[i]] = (grad[i] - projection) / selected;
    total = __builtin_fmaf(out[ids[i]], probabilities[ids[i]], total);
  }
  for (int64_t i = 0; i < experts; ++i) out[i] = probabilities[i] * (out[i] - total);
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

// *fault: -1, or the first row that holds a NaN.
LOCKSTEP_API int32_t lockstep_top_k(
    const float* scores, int64_t rows, int64_t width, int64_t k, float* values, int64_t* ids,
    int32_t threads, int64_t* fault) {
  return guarded([&] {
    *fault = -1;
    const int64_t bad = first_row_with_nan(scores, rows, width);
    if (bad >= 0 || k == 0) return void(*fault = bad);
    const int team = team_size(threads, rows * width);
    std::vector<Scored> scratch(k > kInsertionLimit ? team * width : 0);
    parallel_items(team, rows, [&](int64_t row, int thread) {
      top_k_row(scores + row * width, width, k, values + row * k, ids + row * k,
                scratch.data() + (scratch.empty() ? 0 : thread * width));
    });
  });
}

// Gathers probabilities at ids, optionally divided by their sum in slot order. *fault: -1, or
// row * 4 + reason: 0 an id out of range, 1 an id twice in a row, 2 a gathered sum of zero that has
// to divide, 3 a NaN.
LOCKSTEP_API int32_t lockstep_route_weights(
    const float* probabilities, const int64_t* ids, float* weights, int64_t rows, int64_t experts,
    int64_t k, int32_t normalise, int64_t* fault) {
  return guarded([&] {
    *fault = -1;
    std::vector<int64_t> owner(experts, -1);
    for (int64_t row = 0; row < rows; ++row) {
      const float* source = probabilities + row * experts;
      float total = 0.0f;
      for (int64_t i = 0; i < k; ++i) {
        const int64_t id = ids[row * k + i];
        if (id < 0 || id >= experts) return void(*fault = row * 4);
        if (owner[id] == row) return void(*fault = row * 4 + 1);
        owner[id] = row;
        weights[row * k + i] = source[id];
        total = total + source[id];
      }
      if (total != total) return void(*fault = row * 4 + 3);
      if (!normalise) continue;
      if (total == 0.0f) return void(*fault = row * 4 + 2);
      for (int64_t i = 0; i < k; ++i) weights[row * k + i] = weights[row * k + i] / total;
    }
  });
}

LOCKSTEP_API int32_t lockstep_route_backward(
    const float* grad, const float* probabilities, const int64_t* ids, float* grad_logits,
    int64_t rows, int64_t experts, int64_t k, int32_t normalise, int32_t threads) {
  return guarded([&] {
    parallel_for(team_size(threads, rows * experts), rows, [&](int64_t row) {
      route_row_gradient(grad + row * k, probabilities + row * experts, ids + row * k,
                         grad_logits + row * experts, experts, k, normalise != 0);
    });
  });
}

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
