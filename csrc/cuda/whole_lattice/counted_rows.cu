// counted_rows_product and counted_rows_sums: products of float32 matrices whose number of rows
// only the device knows. Contracts: pruned_rnnt/ops/common/matrix_products.py.
#include "contracts/joiner.h"
#include "cuda/common/ops.cuh"
#include "cuda/common/vector_access.cuh"
#include "cuda/whole_lattice/counted_rows.cuh"

namespace pruned_rnnt::cuda {
namespace {

using Tile = ProductTile<128, 64, 32, 3, 64, 32, 2, 2>;

// A matrix by its lines: rows, or columns if its rows are not contiguous.
struct Factor {
  Factor(const View& x, const char* op)
      : is_transposed(x.stride(1) != 1 && x.size(1) > 1),
        lines{data_of<float>(x), x.stride(is_transposed ? 1 : 0)},
        width(widest_vector<float>(lines.data, lines.stride) == 4 ? 4 : 1) {
    const int along = is_transposed ? 0 : 1;
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float &&
                        (x.stride(along) == 1 || x.size(along) == 1) && x.size(0) <= INT_MAX &&
                        x.size(1) <= INT_MAX,
                    op, " takes float32 matrices with contiguous rows or columns");
  }

  bool is_transposed;
  FactorLines lines;
  int width;  // elements of a copy
};

RowCount count_of(const View& total, int64_t begin, int64_t most) {
  return {data_of<int64_t>(total), begin, int32_t(most)};
}

// A result of contiguous rows.
ProductResult result_of(const View& out, const char* op) {
  const int last = out.dim() - 1;
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.stride(last) == 1, op,
                  " writes float32 rows");
  const int64_t stride = out.stride(last - 1);
  return {mutable_data_of<float>(out), stride, int32_t(out.size(last)),
          reinterpret_cast<uintptr_t>(out.data_ptr()) % 8 == 0 && stride % 2 == 0};
}

uint32_t tiles_of(int64_t rows, int64_t columns) {
  return uint32_t((rows + Tile::kRows - 1) / Tile::kRows *
                  ((columns + Tile::kColumns - 1) / Tile::kColumns));
}

// Calls work(width) with the elements of a copy.
template <typename Work>
void dispatch_copies(const Factor& a, const Factor& b, Work&& work) {
  if (std::min(a.width, b.width) == 1) {
    work(std::integral_constant<int, 1>());
  } else {
    work(std::integral_constant<int, 4>());
  }
}

}  // namespace

void counted_rows_product(const Launcher& launch, const View& a, const View& b,
                          const OptionalView& bias, const View& total, int64_t begin,
                          const View& out) {
  constexpr const char* op = "counted_rows_product";
  const int64_t rows = out.size(0), columns = out.size(1), depth = a.size(1);
  if (rows == 0 || columns == 0) return;
  const Factor first(a, op), second(b, op);
  STD_TORCH_CHECK(!first.is_transposed, op, " takes contiguous rows as the first factor");
  const RowCount count = count_of(total, begin, rows);
  const ProductResult result = result_of(out, op);
  dispatch_copies(first, second, [&](auto width) {
    const auto run = [&](auto b_k_lines) {
      constexpr bool k_lines = decltype(b_k_lines)::value;
      constexpr int floats = decltype(width)::value;
      using Product = BlockProduct<Tile, false, k_lines, floats>;
      launch(counted_rows_product_kernel<Tile, k_lines, floats>, tiles_of(rows, columns),
             Tile::kThreads, Product::kSharedBytes, first.lines, second.lines,
             data_or_null<float>(bias), count, int32_t(depth), result);
    };
    if (second.is_transposed) {
      run(std::false_type());
    } else {
      run(std::true_type());
    }
  });
}

void counted_rows_sums(const Launcher& launch, const View& a, const View& b, const View& total,
                       int64_t begin, bool add, const View& out) {
  constexpr const char* op = "counted_rows_sums";
  const int64_t blocks = out.size(0), rows = out.size(1), columns = out.size(2);
  if (out.numel() == 0) return;
  const Factor first(a, op), second(b, op);
  STD_TORCH_CHECK(!first.is_transposed && !second.is_transposed, op, " takes contiguous rows");
  const RowCount count = count_of(total, begin, a.size(0));
  const ProductResult result = result_of(out, op);
  dispatch_copies(first, second, [&](auto width) {
    constexpr int floats = decltype(width)::value;
    using Product = BlockProduct<Tile, true, true, floats>;
    launch(counted_rows_sums_kernel<Tile, floats>, dim3(tiles_of(rows, columns), uint32_t(blocks)),
           Tile::kThreads, Product::kSharedBytes, first.lines, second.lines, count, int32_t(rows),
           add, result);
  });
}

PRUNED_RNNT_CUDA_OP(counted_rows_product)
PRUNED_RNNT_CUDA_OP(counted_rows_sums)

}  // namespace pruned_rnnt::cuda
