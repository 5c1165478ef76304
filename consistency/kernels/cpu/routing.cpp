// top_k, and the router: softmax over all experts, the k best or replayed ids, their weights.
//
// Ties go to the lowest index; no atomics. The weights of a token are summed in slot order.
#include <utility>
#include <vector>

#include "softmax_row.hpp"
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

// Gathers one row of probabilities at ids. -1, or a reason of lockstep_route_forward.
int8_t route_weights(const float* probabilities, const int64_t* ids, float* weights,
                     int64_t experts, int64_t k, bool normalise) {
  float total = 0.0f;
  for (int64_t i = 0; i < k; ++i) {
    if (ids[i] < 0 || ids[i] >= experts) return 0;
    for (int64_t j = 0; j < i; ++j)
      if (ids[j] == ids[i]) return 1;
    weights[i] = probabilities[ids[i]];
    total = total + weights[i];
  }
  if (!normalise) return -1;
  if (total == 0.0f) return 2;
  for (int64_t i = 0; i < k; ++i) weights[i] = weights[i] / total;
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

// probabilities [rows, experts] = softmax(logits); ids [rows, k] are written, or read when
// `replay`; weights [rows, k] = the probabilities at ids, divided by their sum when `normalise`.
// *fault: -1, or row * 4 + reason: 0 an id out of range, 1 an id twice in a row, 2 a sum of zero
// that has to divide, 3 an undefined softmax.
LOCKSTEP_API int32_t lockstep_route_forward(
    const float* logits, float* probabilities, int64_t* ids, float* weights, int64_t rows,
    int64_t experts, int64_t k, int32_t replay, int32_t normalise, int32_t threads,
    int64_t* fault) {
  return guarded([&] {
    *fault = -1;
    const int team = team_size(threads, rows * experts, 8192);
    std::vector<Scored> scratch(!replay && k > kInsertionLimit ? team * experts : 0);
    std::vector<int8_t> faults(rows);
    parallel_items(team, rows, [&](int64_t row, int thread) {
      float* source = probabilities + row * experts;
      softmax_row<kFloat32>(logits + row * experts, source, experts, false);
      if (source[0] != source[0]) return void(faults[row] = 3);
      if (!replay)
        top_k_row(source, experts, k, weights + row * k, ids + row * k,
                  scratch.data() + (scratch.empty() ? 0 : thread * experts));
      faults[row] = route_weights(source, ids + row * k, weights + row * k, experts, k, normalise);
    });
    for (int64_t row = 0; row < rows; ++row)
      if (faults[row] >= 0) return void(*fault = row * 4 + faults[row]);
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
