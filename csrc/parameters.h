#pragma once
// How a factor or a value fits its input.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/result_type.h>

#include <algorithm>
#include <variant>

namespace my_cuda_op {

// A number; or a tensor of one element, or with one for each channel (the input's dimension `dim`).
using Parameter = std::variant<at::Tensor, at::Scalar>;

// The dtype in which a result of this dtype is computed. (at::toOpMathType of torch 2.11 throws for uint16.)
inline at::ScalarType compute_type(at::ScalarType dtype) {
  if (dtype == at::kHalf || dtype == at::kBFloat16) return at::kFloat;
  return dtype == at::kComplexHalf ? at::kComplexFloat : dtype;
}

// torch.result_type(input, parameter as a number or a 0-d tensor): a parameter never widens a floating-point input.
inline at::ScalarType result_type(const at::Tensor& input, const Parameter& parameter) {
  if (const auto* number = std::get_if<at::Scalar>(&parameter)) return at::result_type(input, *number);
  const auto& tensor = std::get<at::Tensor>(parameter);
  if (tensor.scalar_type() == input.scalar_type()) return input.scalar_type();
  if (tensor.dim() == 0) return at::result_type(input, tensor);
  return at::result_type(input, at::empty({}, tensor.options().device(at::kMeta)));
}

// The dimension of the input along which the parameter varies, or -1 for one element. Throws where they do not fit.
inline int64_t channel_dim(
    const char* op, const at::Tensor& input, const char* name, const at::Tensor& parameter, int64_t dim) {
  TORCH_CHECK(
      parameter.device() == input.device() || (parameter.dim() == 0 && parameter.is_cpu()), op, ": ", name,
      " must be on the device of input, ", input.device(), ", got ", parameter.device());
  if (parameter.numel() == 1) return -1;
  TORCH_CHECK(
      parameter.dim() == 1, op, ": ", name, " must be a number, have one element, or have one dimension, got shape ",
      parameter.sizes());
  const auto dims = std::max<int64_t>(input.dim(), 1); // stock's range for a 0-d tensor; then size(dim) throws
  TORCH_CHECK_INDEX(
      -dims <= dim && dim < dims, op, ": dim must be in the range [", -dims, ", ", dims - 1, "] of an input of shape ",
      input.sizes(), ", got ", dim);
  TORCH_CHECK(
      parameter.numel() == input.size(dim), op, ": ", name, " must have 1 or ", input.size(dim),
      " elements (input.size(", dim, ")), got ", parameter.numel());
  return dim < 0 ? dim + input.dim() : dim;
}

// A view of the parameter, of the input's number of dimensions, that broadcasts against it.
inline at::Tensor broadcast(const at::Tensor& parameter, int64_t input_dims, int64_t channel_dim) {
  if (channel_dim < 0) return parameter.reshape({});
  at::DimVector shape(input_dims, 1);
  shape[channel_dim] = parameter.numel();
  return parameter.view(shape);
}

} // namespace my_cuda_op
