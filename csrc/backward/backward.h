#pragma once
// The backward operators on tensors: gradients of parameters, for any Sum, and relu_backward.

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "kernel.h"
#include "parameters.h"

namespace my_cuda_op {

inline void check_pair(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& grad) {
  TORCH_CHECK(
      grad.sizes() == tensor.sizes(), op, ": grad must have the shape of ", name, ", ", tensor.sizes(), ", got ",
      grad.sizes());
  TORCH_CHECK(
      grad.device() == tensor.device(), op, ": grad must be on the device of ", name, ", ", tensor.device(), ", got ",
      grad.device());
}

// The gradient of a parameter, in its shape and dtype. A first step writes rows of partial sums, each of a fixed share
// of the elements, in the compute type; a second adds the rows up. The order of both is fixed.
template <class Op>
at::Tensor sum_like(const std::array<at::Tensor, Op::tensors>& tensors, const at::Tensor& parameter, int64_t dim) {
  constexpr int64_t kShare = 4096, kMaxRows = 1024; // elements of a channel that are worth a row; rows at most
  const at::Tensor& grad = tensors[0];
  const int64_t channels = parameter.numel();
  const int64_t channel = channel_dim(Op::name, grad, Op::parameter_names[0], parameter, dim);
  Rows rows{};
  rows.count = std::clamp<int64_t>(grad.numel() / std::max<int64_t>(channels, 1) / kShare, 1, kMaxRows);
  const bool one_row = rows.count == 1; // then it is the result already
  const at::Tensor sums = at::zeros(
      one_row ? parameter.sizes() : at::IntArrayRef{rows.count, channels},
      grad.options().dtype(compute_type(grad.scalar_type())));
  rows.bytes = one_row ? 0 : sums.stride(0) * sums.element_size();

  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false); // the sums are expanded on purpose
  config.check_all_same_dtype(false).resize_outputs(false);
  config.add_owned_output(broadcast(one_row ? sums : sums[0], grad.dim(), channel).expand(grad.sizes()));
  for (const auto& tensor : tensors) config.add_owned_const_input(tensor);
  auto iter = config.build();
  kernel<Op>(grad.device().type())(iter, rows);

  at::Tensor sum = one_row ? sums : sums.sum(0);
  if (sum.is_complex() && !parameter.is_complex()) sum = at::real(sum).clone();
  if (sum.sizes() == parameter.sizes()) return sum.to(parameter.scalar_type());
  // Copied: a result must not be a view of something else.
  return at::empty(parameter.sizes(), parameter.options()).copy_(sum.view(parameter.sizes()));
}

template <class Op>
at::Tensor sum_of_products(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& parameter, int64_t dim) {
  check_pair(Op::name, "input", input, grad);
  const auto dtype = at::result_type(grad, input);
  return sum_like<Op>({grad.to(dtype), input.to(dtype)}, parameter, dim);
}

template <class Op>
at::Tensor sum(const at::Tensor& grad, const at::Tensor& parameter, int64_t dim) {
  return sum_like<Op>({grad}, parameter, dim);
}

template <class Op>
at::Tensor backward_by_result(const at::Tensor& grad, const at::Tensor& result) {
  check_pair(Op::name, "result", result, grad);
  const auto dtype = at::result_type(grad, result);
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).declare_static_dtype_and_device(dtype, grad.device());
  config.add_owned_output(at::Tensor());
  config.add_owned_const_input(result.to(dtype)); // first: the strides of the gradient follow it, as in stock PyTorch
  config.add_owned_const_input(grad.to(dtype));
  auto iter = config.build();
  kernel<Op>(grad.device().type())(iter, {});
  return iter.output(0);
}

} // namespace my_cuda_op
