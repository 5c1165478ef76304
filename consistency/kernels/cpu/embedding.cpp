// The gradient of an embedding: rows of equal id are added in order of their position.
#include <vector>

#include "ieee_mode.hpp"
#include "typed.hpp"

// For every distinct id: sum grad[position, :] over its positions in order, from +0, in fp32; then
// out[id, :] = sum (accumulate == 0, rounded once) or out[id, :] + sum (fp32). `ids` is sorted and
// `positions` holds the place of each in the batch, ascending among equal ids.
LOCKSTEP_API int32_t lockstep_embedding_gradient(const int64_t* ids, const int64_t* positions,
                                                 int64_t count, int64_t width, const void* grad,
                                                 int64_t grad_stride, int32_t grad_type, void* out,
                                                 int64_t out_stride, int32_t out_type,
                                                 int32_t accumulate, int32_t threads) {
  using namespace lockstep;
  return guarded([&] {
    std::vector<int64_t> starts;
    for (int64_t i = 0; i < count; ++i)
      if (i == 0 || ids[i] != ids[i - 1]) starts.push_back(i);
    const int64_t distinct = static_cast<int64_t>(starts.size());
    starts.push_back(count);
    const auto from = static_cast<DType>(grad_type), to = static_cast<DType>(out_type);
    const int team = team_size(threads, count * width);
#pragma omp parallel num_threads(team) if (team > 1)
    {
      const IeeeMode mode;
#pragma omp for schedule(dynamic, 16)
      for (int64_t d = 0; d < distinct; ++d) {
        const int64_t row = ids[starts[d]] * out_stride;
        for (int64_t c = 0; c < width; c += kLanes) {
          const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - c));
          F16 total = zero();
          for (int64_t i = starts[d]; i < starts[d + 1]; ++i)
            total = add(total, load_any_partial(grad, positions[i] * grad_stride + c, from, lanes));
          if (accumulate) total = add(load_any_partial(out, row + c, to, lanes), total);
          store_any_partial(out, row + c, to, total, lanes);
        }
      }
    }
  });
}
