// Products of bfloat16 matrices whose number of rows only the device knows: torch's grouped
// products, as multiply_first_rows and row_block_products of
// pruned_rnnt/ops/common/matrix_products.py.
//
// Axes: R rows, m and n columns, G blocks of the rows.
#pragma once

#include <array>

#include "cuda/common/launch.cuh"

namespace pruned_rnnt::cuda {

// A view of the memory of x.
template <size_t dims>
Tensor view_of(const Tensor& x, const std::array<int64_t, dims>& sizes,
               const std::array<int64_t, dims>& strides, int64_t offset = 0) {
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(x.get(), dims, sizes.data(), strides.data(), offset, &result));
  return Tensor(result);
}

// ends (G,) int32: the row of a behind each group, on the device.
inline Tensor grouped_product(const Tensor& a, const Tensor& b, const Tensor& ends) {
  using torch::stable::detail::from;
  std::array<StableIValue, 5> stack{from(a), from(b), from(OptionalTensor(ends)),
                                    from(std::nullopt), from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::_grouped_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// b (m,n) as the second factor of a grouped_product of one group: (R,n) = a (R,m) times b for the
// first ends[0] rows; the others are undefined.
inline Tensor one_group(const Tensor& b) {
  const int64_t m = b.size(0), n = b.size(1), pitch = b.stride(0), step = b.stride(1);
  return view_of<3>(b, {1, m, n}, {m * pitch, pitch, step});
}

// (G,m,n): the product of a (R,m), transposed, and b (R,n) over each block of rows. ends (G,)
// int32: the row behind each block, of which the first begins at row 0.
inline Tensor row_block_products(const Tensor& a, const Tensor& b, const Tensor& ends) {
  return grouped_product(view_of<2>(a, {a.size(1), a.size(0)}, {a.stride(1), a.stride(0)}), b,
                         ends);
}

}  // namespace pruned_rnnt::cuda
