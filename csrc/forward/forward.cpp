#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/promote_types.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/InferenceMode.h>

#include "kernel.h"
#include "operators.h"
#include "parameters.h"

namespace my_cuda_op {
namespace {

using NamedParameters = std::initializer_list<NamedParameter>;

at::ScalarType result_type(const at::Tensor& input, NamedParameters parameters) {
  auto dtype = input.scalar_type();
  for (const auto& [name, value] : parameters) dtype = at::promote_types(dtype, my_cuda_op::result_type(input, value));
  return dtype;
}

// Runs Op into `out`, or into a new tensor where that is undefined: TensorIterator gives it the strides that a stock
// operator's has.
template <class Op>
at::Tensor map(
    const at::Tensor& input, NamedParameters parameters, int64_t dim, at::ScalarType dtype, at::Tensor out = {}) {
  const auto compute_dtype = at::toOpMathType(dtype);
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(true).check_all_same_dtype(false).resize_outputs(false).declare_static_dtype_and_device(
      dtype, input.device());
  config.add_owned_output(out).add_owned_const_input(input.to(dtype));

  Numbers numbers;
  int next = 0;
  for (const auto& [name, value] : parameters) {
    auto& number = numbers[next++];
    if (const auto* given = std::get_if<at::Scalar>(&value)) {
      number = *given;
      // An operand all the same where the output is empty: in stock PyTorch its strides depend on that.
      if (input.numel() == 0) {
        config.add_owned_const_input(at::scalar_tensor(*given, input.options().dtype(dtype)));
      }
      continue;
    }
    const auto& tensor = std::get<at::Tensor>(value);
    const int64_t channel = channel_dim(Op::name, input, name, tensor, dim);
    // Reading it waits for nothing; and beside a CUDA tensor stock PyTorch takes a number on the CPU, too.
    if (tensor.is_cpu() && tensor.dim() == 0) number = tensor.item();
    if (!number || input.numel() == 0) {
      // The kernels read a parameter in the tensor's type or in the compute type, where it loses nothing.
      config.add_owned_const_input(broadcast(
          tensor.scalar_type() == dtype ? tensor : tensor.to(input.device(), compute_dtype), input.dim(), channel));
    }
  }

  auto iter = config.build();
  kernel<Op>(input.device().type())(iter, numbers);
  return iter.output(0);
}

template <class Op>
at::Tensor map(const at::Tensor& input, NamedParameters parameters, int64_t dim = 0) {
  return map<Op>(input, parameters, dim, result_type(input, parameters));
}

template <class Op>
void map_(const at::Tensor& input, NamedParameters parameters, int64_t dim = 0) {
  const auto dtype = result_type(input, parameters);
  TORCH_CHECK(
      at::canCast(dtype, input.scalar_type()), Op::name, "_: the result type must be one that input's dtype ",
      input.scalar_type(), " can hold, got ", dtype);
  TORCH_CHECK(
      !input.is_inference() || c10::InferenceMode::is_enabled(), Op::name,
      "_: input must not be an inference tensor outside InferenceMode; clone() it before the operation");
  TORCH_CHECK(
      at::has_internal_overlap(input) != at::MemOverlap::Yes, Op::name,
      "_: each element of input must have its own memory, got an expanded tensor of shape ", input.sizes(),
      " and strides ", input.strides(), "; clone() it before the operation");
  if (dtype == input.scalar_type()) {
    map<Op>(input, parameters, dim, dtype, input);
  } else {
    input.copy_(map<Op>(input, parameters, dim, dtype));
  }
}

} // namespace

at::Tensor scale(const at::Tensor& input, const Parameter& factor, int64_t dim) {
  return map<ops::Scale>(input, {{"factor", factor}}, dim);
}
void scale_(const at::Tensor& input, const Parameter& factor, int64_t dim) {
  map_<ops::Scale>(input, {{"factor", factor}}, dim);
}

at::Tensor add_scalar(const at::Tensor& input, const Parameter& value, int64_t dim) {
  return map<ops::AddScalar>(input, {{"value", value}}, dim);
}
void add_scalar_(const at::Tensor& input, const Parameter& value, int64_t dim) {
  map_<ops::AddScalar>(input, {{"value", value}}, dim);
}

at::Tensor relu(const at::Tensor& input) {
  return map<ops::ReLU>(input, {});
}
void relu_(const at::Tensor& input) {
  map_<ops::ReLU>(input, {});
}

} // namespace my_cuda_op
