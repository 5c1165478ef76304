// Drives matrix products: cuts them into tiles, one thread per tile, and runs each tile over all
// of K. The cut serves speed alone; the order of reduction is stated in gemm.hpp.
#include "gemm.hpp"

#include <algorithm>
#include <atomic>
#include <new>

#include "ieee_mode.hpp"
#include "microkernel.hpp"
#include "mxfp4_panel.hpp"
#include "scratch.hpp"

namespace lockstep {
namespace {

// Rows of A that are packed at once: 192 x 256 fp32 numbers lie in a level-2 cache.
constexpr int64_t kMostRows = 192;
constexpr int64_t kMostColumns = 256;
constexpr int64_t kFewestColumns = 64;
// Steps in k for which `stream` widens its rows of A at once.
constexpr int64_t kStreamDepth = 2048;
constexpr int64_t kStreamStride = kStreamDepth + kLanes;
// Columns of a packed B that `stream` unpacks at once, as bf16; off a power of two as well.
constexpr int64_t kUnpackedStride = kStreamDepth + 2 * kLanes;
// Multiply-adds that pay for waking a thread.
constexpr int64_t kGrain = int64_t{1} << 18;
constexpr int64_t kTilesPerThread = 4;

struct Tile {
  const Product* product;
  int64_t row, rows, column, columns;
};

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t element_size(DType dtype) { return dtype == kFloat32 ? 4 : 2; }

const void* at(const Operand& operand, int64_t row, int64_t column) {
  return static_cast<const char*>(operand.data) +
         (row * operand.row_stride + column * operand.column_stride) * element_size(operand.dtype);
}

void pack_operand(const Operand& operand, int64_t row, int64_t column, int64_t rows,
                  int64_t columns, float* out, int64_t ld) {
  if (operand.scales != nullptr) {
    const auto* codes = static_cast<const uint8_t*>(operand.data);
    unpack_panel(codes, operand.scales, operand.column_stride, row, column, rows, columns, out, ld);
    return;
  }
  pack(at(operand, row, column), operand.row_stride, operand.column_stride, operand.dtype, rows,
       columns, out, ld);
}

// partial[rows][ld] = columns [column, column + columns) of the product over k in [begin, end), added
// to what is there unless `fresh`.
void packed_tile(const Product& product, int64_t row, int64_t rows, int64_t column, int64_t columns,
                 int64_t begin, int64_t end, bool fresh, float* partial, int64_t ld, float* a,
                 float* b) {
  for (int64_t k = begin; k < end; k += kDepth) {
    const int64_t depth = std::min(kDepth, end - k);
    const bool first = fresh && k == begin;
    pack_operand(product.a, row, k, rows, depth, a, kRowStride);
    for (int64_t c = 0; c < columns; c += kTilePanels * kLanes) {
      int panels = 0;
      for (; panels < kTilePanels && c + panels * kLanes < columns; ++panels) {
        const int64_t offset = c + panels * kLanes;
        const int64_t width = std::min<int64_t>(kLanes, columns - offset);
        float* panel = b + panels * kPanel;
        if (width < kLanes) std::fill(panel, panel + depth * kLanes, 0.0f);
        pack_operand(product.b, k, column + offset, depth, width, panel, kLanes);
      }
      if (panels == kTilePanels)
        tile_rows<kTilePanels>(rows, a, b, depth, partial + c, ld, first);
      else
        tile_rows<1>(rows, a, b, depth, partial + c, ld, first);
    }
  }
}

#if defined(__AVX2__)
// Calls body(std::integral_constant<int, rows>) for rows in [1, kStreamRows].
template <int kRows = 1, typename Body>
void with_rows(int64_t rows, Body&& body) {
  if constexpr (kRows < kStreamRows) {
    if (rows > kRows) return with_rows<kRows + 1>(rows, body);
  }
  body(std::integral_constant<int, kRows>{});
}

bool streams(const Product& product) {
  return product.m <= kStreamRows && product.b.row_stride == 1 && product.n >= 8;
}

// `depth` steps of all columns, for B in memory.
template <int kRows>
void stream_dense(const Product& product, int64_t k, int64_t depth, int64_t column, int64_t columns,
                  bool first, const float* a, float* sums) {
  with_type(product.b.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const auto* b = static_cast<const Element<kType>*>(at(product.b, k, column));
    const int64_t stride = product.b.column_stride;
    for (int64_t c = 0; c < columns; c += 8 * kGroups)
      stream_columns<kRows, kType>(a, kStreamStride, b + c * stride, stride,
                                   std::min(kGroups, (columns - c) / 8), depth, sums + c * kRows,
                                   first);
  });
}

// The same for a packed B: a group of columns at a time is unpacked into `unpacked`.
template <int kRows>
void stream_packed(const Product& product, int64_t k, int64_t depth, int64_t column,
                   int64_t columns, bool first, const float* a, float* sums, uint16_t* unpacked) {
  const auto* codes = static_cast<const uint8_t*>(product.b.data);
  for (int64_t c = 0; c < columns; c += 8 * kGroups) {
    const int64_t groups = std::min(kGroups, (columns - c) / 8);
    unpack_columns(codes, product.b.scales, product.b.column_stride, k, column + c, depth,
                   groups * 8, unpacked, kUnpackedStride);
    stream_columns<kRows, kBFloat16>(a, kStreamStride, unpacked, kUnpackedStride, groups, depth,
                                     sums + c * kRows, first);
  }
}

// The same for a tile of few rows whose columns are a multiple of eight, contiguous in k.
void streamed_tile(const Product& product, int64_t rows, int64_t column, int64_t columns,
                   int64_t begin, int64_t end, bool fresh, float* partial, int64_t ld, float* a,
                   uint16_t* unpacked) {
  alignas(64) float sums[kMostColumns * kStreamRows];
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r)
      sums[(c / 8 * rows + r) * 8 + c % 8] = fresh ? 0.0f : partial[r * ld + c];
  for (int64_t k = begin; k < end; k += kStreamDepth) {
    const int64_t depth = std::min(kStreamDepth, end - k);
    const bool first = fresh && k == begin;
    pack_operand(product.a, 0, k, rows, depth, a, kStreamStride);
    with_rows(rows, [&](auto count) {
      constexpr int kRows = decltype(count)::value;
      if (product.b.scales != nullptr)
        stream_packed<kRows>(product, k, depth, column, columns, first, a, sums, unpacked);
      else
        stream_dense<kRows>(product, k, depth, column, columns, first, a, sums);
    });
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += 8)
      std::copy_n(sums + (c / 8 * rows + r) * 8, 8, partial + r * ld + c);
}
#endif

// Adds bias, rounds once and stores.
void finish(const Product& product, const Tile& tile, const float* partial, int64_t ld) {
  const Result& c = product.c;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* row = partial + r * ld;
    const int64_t base = (tile.row + r) * c.row_stride + tile.column * c.column_stride;
    if (c.column_stride == 1) {
      for (int64_t i = 0; i < tile.columns; i += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, tile.columns - i));
        F16 value = load(row + i);
        if (product.bias != nullptr)
          value = add(value, load_any_partial(product.bias, tile.column + i, product.bias_dtype,
                                              count));
        if (product.mode == kAccumulate)
          value = add(load_any_partial(c.data, base + i, c.dtype, count), value);
        store_any_partial(c.data, base + i, c.dtype, value, count);
      }
      continue;
    }
    for (int64_t i = 0; i < tile.columns; ++i) {
      const int64_t index = base + i * c.column_stride;
      float value = row[i];
      if (product.bias != nullptr)
        value += load_scalar(product.bias, tile.column + i, product.bias_dtype);
      if (product.mode == kAccumulate) value = load_scalar(c.data, index, c.dtype) + value;
      store_scalar(c.data, index, c.dtype, value);
    }
  }
}

// Computes one tile of a product; false when there is no memory for its scratch buffers.
bool run_tile(const Tile& tile) {
  const Product& product = *tile.product;
  // Off a power of two, so that rows spread over cache sets.
  const int64_t ld = round_up(tile.columns, kTilePanels * kLanes) + kLanes;
  const int64_t size = tile.rows * ld;
  int64_t levels = 1;
  while ((int64_t{1} << (levels - 1)) < product.chunks) ++levels;

  thread_local Scratch scratch;
  constexpr int64_t kPacked = kMostRows * kRowStride + kTilePanels * kPanel;
  static_assert(kPacked >= 8 * kStreamStride, "stream uses the same space");
  int64_t unpacked = 0;
#if defined(__AVX2__)
  // Two bf16 numbers lie in the room of one fp32 number.
  if (product.b.scales != nullptr) unpacked = 8 * kGroups * kUnpackedStride / 2;
#endif
  float* a = scratch.reserve(kPacked + unpacked + levels * size);
  if (a == nullptr) return false;
  float* b = a + kMostRows * kRowStride;
  float* stack = a + kPacked + unpacked;

  int64_t streamed = 0;
#if defined(__AVX2__)
  // Whole panels: a panel that began in the middle of one would end in the next row of partial.
  if (streams(product)) streamed = tile.columns / kLanes * kLanes;
#endif
  const bool fresh = product.mode != kContinue;
  const int64_t chunks = product.k == 0 ? 1 : product.chunks;
  if (product.k == 0) std::fill(stack, stack + size, 0.0f);
  if (!fresh)
    pack(static_cast<const float*>(product.c.data) + tile.row * product.c.row_stride +
             tile.column * product.c.column_stride,
         product.c.row_stride, product.c.column_stride, kFloat32, tile.rows, tile.columns, stack,
         ld);

  int64_t top = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = product.k / chunks * chunk;
    const int64_t end = product.k / chunks * (chunk + 1);
    float* partial = stack + top * size;
#if defined(__AVX2__)
    if (streamed > 0)
      streamed_tile(product, tile.rows, tile.column, streamed, begin, end, fresh, partial, ld, a,
                    reinterpret_cast<uint16_t*>(a + kPacked));
#endif
    if (streamed < tile.columns)
      packed_tile(product, tile.row, tile.rows, tile.column + streamed, tile.columns - streamed,
                  begin, end, fresh, partial + streamed, ld, a, b);
    for (int64_t done = chunk + 1; done % 2 == 0; done /= 2, --top) {
      float* left = stack + (top - 1) * size;
      const float* right = stack + top * size;
      for (int64_t i = 0; i < size; i += kLanes)
        store(left + i, add(load(left + i), load(right + i)));
    }
    ++top;
  }
  finish(product, tile, stack, ld);
  return true;
}

int64_t tile_count(const std::vector<Product>& products, int64_t rows, int64_t columns) {
  int64_t count = 0;
  for (const Product& product : products)
    count += ((product.m + rows - 1) / rows) * ((product.n + columns - 1) / columns);
  return count;
}

std::vector<Tile> cut(const std::vector<Product>& products, int64_t threads) {
  int64_t rows = kMostRows, columns = kMostColumns;
  if (threads > 1) {
    const int64_t wanted = threads * kTilesPerThread;
    while (columns > kFewestColumns && tile_count(products, rows, columns) < wanted) columns /= 2;
    while (rows > kTileRows * 4 && tile_count(products, rows, columns) < wanted) rows /= 2;
  }
  std::vector<Tile> tiles;
  for (const Product& product : products) {
    if (product.m == 0 || product.n == 0) continue;
    if (product.k == 0 && product.mode != kWrite) continue;
    const int64_t strips = (product.m + rows - 1) / rows;
    const int64_t height = round_up((product.m + strips - 1) / strips, kTileRows);
    for (int64_t n = 0; n < product.n; n += columns)
      for (int64_t m = 0; m < product.m; m += std::min(height, rows))
        tiles.push_back({&product, m, std::min({height, rows, product.m - m}), n,
                         std::min(columns, product.n - n)});
  }
  return tiles;
}

}  // namespace

void multiply(const std::vector<Product>& products, int32_t threads) {
  int64_t work = 0;
  for (const Product& product : products) work += product.m * product.n * product.k;
  const int team = static_cast<int>(std::clamp<int64_t>(work / kGrain, 1, std::max(threads, 1)));
  const std::vector<Tile> tiles = cut(products, team);
  const int64_t count = static_cast<int64_t>(tiles.size());
  std::atomic<bool> starved{false};
#pragma omp parallel num_threads(team) if (team > 1)
  {
    const IeeeMode mode;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i)
      if (!run_tile(tiles[i])) starved = true;
  }
  if (starved) throw std::bad_alloc();
}

}  // namespace lockstep

// The requests mirror the struct formats in _gemm.py: every field is eight bytes wide, because one
// packed argument crosses ctypes much faster than twenty separate ones.
namespace lockstep {
namespace {

struct OperandRequest {
  const void* data;
  int64_t row, column, dtype;
};

struct ResultRequest {
  void* data;
  int64_t row, column, dtype;
};

struct GemmRequest {
  int64_t m, n, k;
  OperandRequest a, b;
  const void* bias;
  int64_t bias_dtype;
  ResultRequest c;
  int64_t chunks, mode, threads;
};

struct BatchedRequest {
  int64_t batches, m, n, k;
  OperandRequest a, b;
  ResultRequest c;
  int64_t a_batch, b_batch, c_batch, chunks, threads;
};

struct GroupedRowsRequest {
  int64_t groups;
  const int64_t* offsets;
  int64_t n, k;
  OperandRequest a, b;
  int64_t b_group;
  ResultRequest c;
  int64_t chunks, threads;
};

struct GroupedStepsRequest {
  int64_t groups;
  const int64_t* offsets;
  int64_t m, n;
  OperandRequest a, b;
  ResultRequest c;
  int64_t c_group, mode, threads;
};

Operand operand(const OperandRequest& r) {
  return {r.data, r.row, r.column, static_cast<DType>(r.dtype)};
}

Result result(const ResultRequest& r) {
  return {r.data, r.row, r.column, static_cast<DType>(r.dtype)};
}

}  // namespace
}  // namespace lockstep

// C[m, n] = A[m, k] B[k, n] + bias[n].
LOCKSTEP_API int32_t lockstep_gemm(const void* request) {
  using namespace lockstep;
  return guarded([&] {
    const auto& r = *static_cast<const GemmRequest*>(request);
    multiply({{r.m, r.n, r.k, operand(r.a), operand(r.b), r.bias, static_cast<DType>(r.bias_dtype),
               result(r.c), r.chunks, static_cast<Mode>(r.mode)}},
             static_cast<int32_t>(r.threads));
  });
}

// For every i: C_i[m, n] = A_i[m, k] B_i[k, n], X_i = X + i * x_batch.
LOCKSTEP_API int32_t lockstep_batched_gemm(const void* request) {
  using namespace lockstep;
  return guarded([&] {
    const auto& r = *static_cast<const BatchedRequest*>(request);
    std::vector<Product> products;
    for (int64_t i = 0; i < r.batches; ++i) {
      Operand a = operand(r.a), b = operand(r.b);
      Result c = result(r.c);
      a.data = static_cast<const char*>(a.data) + i * r.a_batch * element_size(a.dtype);
      b.data = static_cast<const char*>(b.data) + i * r.b_batch * element_size(b.dtype);
      c.data = static_cast<char*>(c.data) + i * r.c_batch * element_size(c.dtype);
      products.push_back({r.m, r.n, r.k, a, b, nullptr, kFloat32, c, r.chunks, kWrite});
    }
    multiply(products, static_cast<int32_t>(r.threads));
  });
}

// For every group g: C[rows of g, n] = A[rows of g, k] B_g[k, n], rows of g = [offsets[g],
// offsets[g + 1]), B_g = B + g * b_group.
LOCKSTEP_API int32_t lockstep_grouped_rows(const void* request) {
  using namespace lockstep;
  return guarded([&] {
    const auto& r = *static_cast<const GroupedRowsRequest*>(request);
    std::vector<Product> products;
    for (int64_t g = 0; g < r.groups; ++g) {
      const int64_t start = r.offsets[g], rows = r.offsets[g + 1] - start;
      if (rows == 0) continue;
      Operand a = operand(r.a), b = operand(r.b);
      Result c = result(r.c);
      a.data = at(a, start, 0);
      b.data = static_cast<const char*>(b.data) + g * r.b_group * element_size(b.dtype);
      c.data = static_cast<char*>(c.data) + start * c.row_stride * element_size(c.dtype);
      products.push_back({rows, r.n, r.k, a, b, nullptr, kFloat32, c, r.chunks, kWrite});
    }
    multiply(products, static_cast<int32_t>(r.threads));
  });
}

// For every group g: C_g[m, n] = A[m, steps of g] B[steps of g, n], steps of g = [offsets[g],
// offsets[g + 1]), C_g = C + g * c_group; one chunk.
LOCKSTEP_API int32_t lockstep_grouped_steps(const void* request) {
  using namespace lockstep;
  return guarded([&] {
    const auto& r = *static_cast<const GroupedStepsRequest*>(request);
    std::vector<Product> products;
    for (int64_t g = 0; g < r.groups; ++g) {
      const int64_t start = r.offsets[g], steps = r.offsets[g + 1] - start;
      Operand a = operand(r.a), b = operand(r.b);
      Result c = result(r.c);
      a.data = at(a, 0, start);
      b.data = at(b, start, 0);
      c.data = static_cast<char*>(c.data) + g * r.c_group * element_size(c.dtype);
      products.push_back(
          {r.m, r.n, steps, a, b, nullptr, kFloat32, c, 1, static_cast<Mode>(r.mode)});
    }
    multiply(products, static_cast<int32_t>(r.threads));
  });
}
