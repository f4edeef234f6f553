#pragma once
// The forward operators on tensors, for any Map: with or without a parameter, in a new tensor or in place.

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/promote_types.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "kernel.h"
#include "parameters.h"

namespace my_cuda_op {

// Runs Op into `out`, or into a new tensor where that is undefined: TensorIterator gives it the strides that the result
// of a stock operator has.
template <class Op>
at::Tensor map(
    at::ScalarType dtype,
    const at::Tensor& out,
    const at::Tensor& input,
    at::ArrayRef<Parameter> parameters,
    int64_t dim) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(true).check_all_same_dtype(false).resize_outputs(false);
  config.declare_static_dtype_and_device(dtype, input.device());
  config.add_owned_output(out).add_owned_const_input(input.scalar_type() == dtype ? input : input.to(dtype));

  Numbers numbers;
  bool any_number = false;
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (const auto* number = std::get_if<at::Scalar>(&parameters[p])) {
      numbers[p] = *number;
    } else {
      const auto& tensor = std::get<at::Tensor>(parameters[p]);
      const int64_t channel = channel_dim(Op::name, input, Op::parameter_names[p], tensor, dim);
      if (tensor.is_cpu() && tensor.dim() == 0) {
        // Reading it waits for nothing; and beside a CUDA tensor stock PyTorch takes a number on the CPU, too.
        numbers[p] = tensor.item();
      } else {
        // The kernels read a parameter in the result's type or in the compute type, where it loses nothing.
        config.add_owned_const_input(
            broadcast(tensor.scalar_type() == dtype ? tensor : tensor.to(compute_type(dtype)), input.dim(), channel));
      }
    }
    any_number |= numbers[p].has_value();
  }
  // In stock PyTorch a number is an operand too, and then TensorIterator gives other strides to dimensions of size 1
  // and to tensors without elements. Nowhere else does it matter, and there it would cost a tensor.
  const auto sizes = input.sizes();
  if (any_number && std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size <= 1; })) {
    config.add_owned_const_input(at::empty({}, input.options().dtype(dtype)));
  }

  auto iter = config.build();
  kernel<Op>(input.device().type())(iter, numbers);
  return iter.output(0);
}

inline at::ScalarType result_type(const at::Tensor& input, at::ArrayRef<Parameter> parameters) {
  auto dtype = input.scalar_type();
  for (const auto& parameter : parameters) dtype = at::promote_types(dtype, result_type(input, parameter));
  return dtype;
}

template <class Op>
at::Tensor map(const at::Tensor& input, at::ArrayRef<Parameter> parameters = {}, int64_t dim = 0) {
  const auto dtype = result_type(input, parameters), computed = compute_type(dtype);
  if (computed != dtype && at::isIntegralType(input.scalar_type(), /*includeBool=*/true)) {
    return map<Op>(computed, {}, input, parameters, dim).to(dtype); // float16 may not hold the integers themselves
  }
  return map<Op>(dtype, {}, input, parameters, dim);
}

template <class Op>
void map_(const at::Tensor& input, at::ArrayRef<Parameter> parameters = {}, int64_t dim = 0) {
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
    map<Op>(dtype, input, input, parameters, dim);
  } else {
    input.copy_(map<Op>(dtype, {}, input, parameters, dim));
  }
}

// What library.cpp gives to the dispatcher: plain functions, one for each kind of schema.
template <class Op>
at::Tensor unary(const at::Tensor& input) {
  return map<Op>(input);
}
template <class Op>
void unary_(at::Tensor& input) {
  map_<Op>(input);
}
template <class Op, class Value>
at::Tensor parametrized(const at::Tensor& input, const Value& parameter, int64_t dim) {
  return map<Op>(input, Parameter(parameter), dim);
}
template <class Op, class Value>
void parametrized_(at::Tensor& input, const Value& parameter, int64_t dim) {
  map_<Op>(input, Parameter(parameter), dim);
}

} // namespace my_cuda_op
