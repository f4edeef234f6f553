#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/zeros.h>

#include "kernel.h"
#include "operators.h"
#include "parameters.h"

namespace my_cuda_op {
namespace {

void check_pair(const char* op, const char* a_name, const at::Tensor& a, const char* b_name, const at::Tensor& b) {
  TORCH_CHECK(
      a.sizes() == b.sizes(), op, ": ", a_name, " must have the shape of ", b_name, ", ", b.sizes(), ", got ",
      a.sizes());
  TORCH_CHECK(
      a.device() == b.device(), op, ": ", a_name, " must be on the device of ", b_name, ", ", b.device(), ", got ",
      a.device());
}

// The gradient of a parameter: in a first step rows of partial sums, each of a fixed share of the elements, in the
// compute type; in a second the sum of the rows. Both orders are fixed.
template <class Op>
at::Tensor sum_like(
    const char* name, const at::Tensor& parameter, int64_t dim, std::array<at::Tensor, Op::tensors> tensors) {
  constexpr int64_t kShare = 4096, kMaxRows = 1024; // elements of a channel that are worth a row; rows at most
  const at::Tensor& grad = tensors[0];
  const int64_t channels = parameter.numel();
  const int64_t channel = channel_dim(Op::name, grad, name, parameter, dim);
  Rows rows{};
  rows.count = std::clamp<int64_t>(grad.numel() / std::max<int64_t>(channels, 1) / kShare, 1, kMaxRows);
  const at::Tensor sums = at::zeros({rows.count, channels}, grad.options().dtype(at::toOpMathType(grad.scalar_type())));
  rows.bytes = sums.stride(0) * sums.element_size();

  at::TensorIteratorConfig config;
  config
      .set_check_mem_overlap(false) // the sums are expanded on purpose
      .check_all_same_dtype(false)
      .resize_outputs(false);
  config.add_owned_output(broadcast(sums[0], grad.dim(), channel).expand(grad.sizes()));
  for (const auto& tensor : tensors) config.add_owned_const_input(tensor);
  auto iter = config.build();
  kernel<Op>(grad.device().type())(iter, rows);

  at::Tensor sum = sums.sum(0);
  if (sum.is_complex() && !parameter.is_complex()) sum = at::real(sum);
  return at::empty(parameter.sizes(), parameter.options())
      .copy_(sum.view(parameter.sizes())); // a result, not a view of one
}

} // namespace

at::Tensor scale_backward_factor(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& factor, int64_t dim) {
  check_pair("scale_backward_factor", "grad", grad, "input", input);
  const auto dtype = at::result_type(grad, input);
  return sum_like<ops::ScaleBackwardFactor>("factor", factor, dim, {grad.to(dtype), input.to(dtype)});
}

at::Tensor add_scalar_backward_value(const at::Tensor& grad, const at::Tensor& value, int64_t dim) {
  return sum_like<ops::AddScalarBackwardValue>("value", value, dim, {grad});
}

at::Tensor relu_backward(const at::Tensor& grad, const at::Tensor& result) {
  check_pair("relu_backward", "grad", grad, "result", result);
  const auto dtype = at::result_type(grad, result);
  auto iter = at::TensorIteratorConfig()
                  .check_all_same_dtype(false)
                  .declare_static_dtype_and_device(dtype, grad.device())
                  .add_owned_output(at::Tensor())
                  .add_owned_const_input(
                      result.to(dtype)) // first, because the strides of the gradient follow it, as in stock PyTorch
                  .add_owned_const_input(grad.to(dtype))
                  .build();
  kernel<ops::ReLUBackward>(grad.device().type())(iter, {});
  return iter.output(0);
}

} // namespace my_cuda_op
