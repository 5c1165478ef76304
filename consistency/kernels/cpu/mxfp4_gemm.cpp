// Products with packed MXFP4 weights: the loops of gemm.cpp over another source of B.
#include <vector>

#include "gemm.hpp"
#include "typed.hpp"

// Mirrors the struct format in _mxfp4_gemm.py: every field is eight bytes wide.
namespace lockstep {
namespace {

struct Mxfp4Request {
  int64_t groups;
  const int64_t* offsets;
  int64_t n, k;
  const void* a;
  int64_t a_row, a_column, a_dtype;
  const uint8_t* codes;
  const uint8_t* scales;
  const void* bias;
  int64_t bias_dtype;
  void* c;
  int64_t c_row, c_column, c_dtype;
  int64_t chunks, threads;
};

int64_t bytes_of(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

}  // namespace
}  // namespace lockstep

// For every group g: C[rows of g, n] = A[rows of g, k] W_g^T + bias, rows of g = [offsets[g],
// offsets[g + 1]); W_g: codes [n, k / 2] and scales [n, k / 32], the groups one after another.
LOCKSTEP_API int32_t lockstep_mxfp4_grouped(const void* request) {
  using namespace lockstep;
  return guarded([&] {
    const auto& r = *static_cast<const Mxfp4Request*>(request);
    std::vector<Product> products;
    for (int64_t g = 0; g < r.groups; ++g) {
      const int64_t start = r.offsets[g], rows = r.offsets[g + 1] - start;
      if (rows == 0) continue;
      const Operand a{static_cast<const char*>(r.a) + start * r.a_row * bytes_of(r.a_dtype),
                      r.a_row, r.a_column, static_cast<DType>(r.a_dtype)};
      const Operand b{r.codes + g * r.n * r.k / 2, 1, r.k, kBFloat16,
                      r.scales + g * r.n * r.k / 32};
      const Result c{static_cast<char*>(r.c) + start * r.c_row * bytes_of(r.c_dtype), r.c_row,
                     r.c_column, static_cast<DType>(r.c_dtype)};
      products.push_back({rows, r.n, r.k, a, b, r.bias, static_cast<DType>(r.bias_dtype), c,
                          r.chunks, kWrite});
    }
    multiply(products, static_cast<int32_t>(r.threads));
  });
}
