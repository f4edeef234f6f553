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
#include "plan.h"

namespace my_cuda_op {

// What an operator is called with. The residual has the input's shape, and may be undefined.
struct Inputs {
  const at::Tensor& input;
  at::ArrayRef<Parameter> parameters;
  int64_t dim = 0;
  at::Tensor residual;
};

inline at::ScalarType result_type(const Inputs& in) {
  if (in.parameters.empty()) return in.input.scalar_type();
  auto dtype = result_type(in.input, in.parameters[0]);
  for (const auto& parameter : in.parameters.slice(1)) {
    dtype = at::promote_types(dtype, result_type(in.input, parameter));
  }
  return dtype;
}

// Adds the parameter, unless it is a number, to the operands of the iterator and of the call.
template <class Op>
void add_parameter(
    at::TensorIteratorConfig& config,
    Call& call,
    const at::Tensor& input,
    size_t p,
    const Parameter& parameter,
    int64_t dim) {
  if (const auto* number = std::get_if<at::Scalar>(&parameter)) {
    call.numbers[p] = *number;
    return;
  }
  const auto& tensor = std::get<at::Tensor>(parameter);
  const int64_t channel = channel_dim(Op::name, input, Op::parameter_names[p], tensor, dim);
  if (tensor.is_cpu() && tensor.dim() == 0) {
    // Reading it waits for nothing; and beside a CUDA tensor stock PyTorch takes a number on the CPU, too.
    call.numbers[p] = tensor.item();
    return;
  }
  // The kernels read a parameter in the result's type or in the compute type, where it loses nothing.
  const bool is_dtype = tensor.scalar_type() == call.dtype;
  const at::Tensor operand = is_dtype ? tensor : tensor.to(compute_type(call.dtype));
  if (input.numel() == 1 && operand.is_alias_of(input)) { // in place with itself, which only the same view may be
    config.add_owned_const_input(operand.as_strided(input.sizes(), input.strides()));
  } else {
    config.add_owned_const_input(broadcast(operand, input.dim(), channel));
  }
  call.present.set(Op::first_parameter + p);
}

// A mask for a tensor of so many elements.
inline at::Tensor empty_mask(const at::Tensor& like) {
  return at::empty({(like.numel() + 31) / 32 * 4}, like.options().dtype(at::kByte));
}

// Does the iterator go through its output in the order of its memory, row by row in whole vectors and whole bytes of
// the mask?
inline bool is_in_order(const at::TensorIteratorBase& iter) {
  const int64_t unit = std::max<int64_t>(16 / iter.element_size(0), 8);
  if (!is_one_plan(iter) || (iter.ndim() > 1 && iter.shape()[0] % unit != 0)) return false;
  int64_t stride = iter.element_size(0);
  for (int d = 0; d < iter.ndim(); ++d) {
    if (iter.strides(0)[d] != stride) return false;
    stride *= iter.shape()[d];
  }
  return true;
}

// The mask of a dense tensor that comes out of a ReLU, which another ReLU leaves as it is.
inline void write_mask(const at::Tensor& output, const at::Tensor& mask) {
  const at::Tensor run = output.as_strided({output.numel()}, {1});
  auto iter = at::TensorIterator::unary_op(const_cast<at::Tensor&>(run), run);
  Call call{.dtype = output.scalar_type(), .mask = static_cast<uint8_t*>(mask.data_ptr())};
  call.present.set(0).set(ops::ReLU::first_tensor);
  kernel<ops::ReLU>(output.device().type())(iter, call);
}

// Lays out Op into `out`, or into a new tensor where that is undefined: TensorIterator gives it the strides that the
// result of a stock operator has.
template <class Op>
at::TensorIterator lay_out(Call& call, const at::Tensor& out, const Inputs& in) {
  const auto dtype = call.dtype;
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(true).check_all_same_dtype(false).resize_outputs(false);
  config.declare_static_dtype_and_device(dtype, in.input.device());
  config.add_owned_output(out).add_owned_const_input(in.input.scalar_type() == dtype ? in.input : in.input.to(dtype));
  call.present.set(0).set(Op::first_tensor);
  if (in.residual.defined()) {
    TORCH_CHECK(
        in.residual.sizes() == in.input.sizes(), Op::name, ": residual must have the shape of input, ",
        in.input.sizes(), ", got ", in.residual.sizes());
    TORCH_CHECK(
        in.residual.scalar_type() == in.input.scalar_type(), Op::name, ": residual must have the dtype of input, ",
        in.input.scalar_type(), ", got ", in.residual.scalar_type());
    TORCH_CHECK(
        in.residual.device() == in.input.device(), Op::name, ": residual must be on the device of input, ",
        in.input.device(), ", got ", in.residual.device());
    config.add_owned_const_input(in.residual.to(dtype));
    call.present.set(Op::first_tensor + 1);
  }
  for (size_t p = 0; p < in.parameters.size(); ++p) {
    add_parameter<Op>(config, call, in.input, p, in.parameters[p], in.dim);
  }
  // In stock PyTorch a number is an operand too, and then TensorIterator gives other strides to dimensions of size 1
  // and to tensors without elements. Nowhere else does it matter, and there it would cost a tensor.
  const auto sizes = in.input.sizes();
  if ((call.numbers[0] || call.numbers[1]) &&
      std::any_of(sizes.begin(), sizes.end(), [](int64_t n) { return n <= 1; })) {
    config.add_owned_const_input(at::empty({}, in.input.options().dtype(dtype)));
  }
  return config.build();
}

// Runs Op, and writes the mask, where that is defined.
template <class Op>
at::Tensor map(at::ScalarType dtype, const at::Tensor& out, const Inputs& in, const at::Tensor& mask = {}) {
  Call call{.dtype = dtype};
  auto iter = lay_out<Op>(call, out, in);
  const bool fused = mask.defined() && is_in_order(iter);
  if (fused) call.mask = static_cast<uint8_t*>(mask.data_ptr());
  kernel<Op>(in.input.device().type())(iter, call);
  if (mask.defined() && !fused) write_mask(iter.output(0), mask);
  return iter.output(0);
}

// float16 may not hold the integers themselves.
inline bool is_computed_apart(const at::Tensor& input, at::ScalarType dtype) {
  return compute_type(dtype) != dtype && at::isIntegralType(input.scalar_type(), /*includeBool=*/true);
}

template <class Op>
at::Tensor map(const Inputs& in) {
  const auto dtype = result_type(in);
  if (is_computed_apart(in.input, dtype)) return map<Op>(compute_type(dtype), {}, in).to(dtype);
  return map<Op>(dtype, {}, in);
}

// The result, and the mask that its backward needs.
template <class Op>
std::tuple<at::Tensor, at::Tensor> map_masked(const Inputs& in) {
  const auto dtype = result_type(in);
  const at::Tensor mask = empty_mask(in.input);
  if (!is_computed_apart(in.input, dtype)) return {map<Op>(dtype, {}, in, mask), mask};
  const at::Tensor output = map<Op>(in);
  write_mask(output, mask);
  return {output, mask};
}

template <class Op>
void map_(const Inputs& in) {
  const auto& input = in.input;
  const auto dtype = result_type(in);
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
    map<Op>(dtype, input, in);
  } else {
    input.copy_(map<Op>(dtype, {}, in));
  }
}

// What library.cpp gives to the dispatcher: plain functions, for each kind of schema.
template <class Op>
at::Tensor unary(const at::Tensor& input) {
  return map<Op>({input});
}
template <class Op>
void unary_(at::Tensor& input) {
  map_<Op>({input});
}
template <class Op, class Value>
at::Tensor parametrized(const at::Tensor& input, const Value& parameter, int64_t dim) {
  return map<Op>({input, Parameter(parameter), dim});
}
template <class Op, class Value>
void parametrized_(at::Tensor& input, const Value& parameter, int64_t dim) {
  map_<Op>({input, Parameter(parameter), dim});
}

using Residual = std::optional<at::Tensor>;
template <class Op, class Factor, class Value>
at::Tensor affine(
    const at::Tensor& input, const Factor& factor, const Value& value, const Residual& residual, int64_t dim) {
  return map<Op>({input, {Parameter(factor), Parameter(value)}, dim, residual.value_or(at::Tensor())});
}
template <class Op, class Factor, class Value>
std::tuple<at::Tensor, at::Tensor> affine_masked(
    const at::Tensor& input, const Factor& factor, const Value& value, const Residual& residual, int64_t dim) {
  return map_masked<Op>({input, {Parameter(factor), Parameter(value)}, dim, residual.value_or(at::Tensor())});
}
template <class Op, class Factor, class Value>
void affine_(at::Tensor& input, const Factor& factor, const Value& value, const Residual& residual, int64_t dim) {
  map_<Op>({input, {Parameter(factor), Parameter(value)}, dim, residual.value_or(at::Tensor())});
}

} // namespace my_cuda_op
