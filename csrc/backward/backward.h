#pragma once
// The backward operators on tensors: gradients of parameters, for any Sum, and relu_backward.

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/real.h>
#include <ATen/ops/result_type.h>
#include <c10/core/Contiguity.h>

#include <algorithm>

#include "forward/forward.h"

namespace my_cuda_op {

inline void check_pair(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& grad) {
  TORCH_CHECK(
      grad.sizes() == tensor.sizes(), op, ": grad must have the shape of ", name, ", ", tensor.sizes(), ", got ",
      grad.sizes());
  TORCH_CHECK(
      grad.device() == tensor.device(), op, ": grad must be on the device of ", name, ", ", tensor.device(), ", got ",
      grad.device());
}

// Where the gradient of the parameter is added up: in its own dtype, if the kernel has it.
inline at::Tensor empty_total(
    Call::Total& total, const at::Tensor& parameter, at::ScalarType dtype, at::TensorOptions options) {
  total.wide = parameter.scalar_type() != dtype;
  total.one = parameter.numel() == 1;
  const auto result = at::empty(parameter.sizes(), options.dtype(total.wide ? compute_type(dtype) : dtype));
  total.data = result.data_ptr();
  return result;
}
inline at::Tensor as_gradient(at::Tensor total, const at::Tensor& parameter) {
  if (total.is_complex() && !parameter.is_complex()) total = at::real(total).clone(); // a result must not be a view
  return total.to(parameter.scalar_type());
}

// Which gradients of scale_add are asked for: in the order of its arguments.
struct Needs {
  bool input, factor, value, residual;
};

// The mask has no shape of its own: what the strides lead to must lie in it.
inline void check_mask(const char* op, const at::Tensor& mask, at::IntArrayRef strides, const at::Tensor& grad) {
  TORCH_CHECK(
      mask.device() == grad.device(), op, ": mask must be on the device of grad, ", grad.device(), ", got ",
      mask.device());
  TORCH_CHECK(
      mask.scalar_type() == at::kByte && mask.is_contiguous() && mask.numel() == (grad.numel() + 31) / 32 * 4, op,
      ": mask must be contiguous and have one bit for each element of grad, in words of 32, got ", mask.numel(),
      " elements of ", mask.scalar_type(), " for ", grad.numel());
  const bool dense = strides.size() == grad.sizes().size() &&
                     (grad.numel() == 0 || c10::_compute_non_overlapping_and_dense(grad.sizes(), strides));
  TORCH_CHECK(
      dense, op, ": strides must be those of a dense tensor of the shape of grad, ", grad.sizes(), ", got ", strides);
}

// How many rows of partial sums are worth adding up. `across`: neighbours in memory are of different channels.
inline int64_t number_of_rows(
    const at::Tensor& grad, int64_t channels, bool across, at::ScalarType dtype, const Needs& needs) {
  // A block of the CUDA kernel has so many channels: 32 vectors, at the most, lie side by side in it.
  const int64_t together = across ? std::clamp<int64_t>(channels, 1, 512 / grad.element_size()) : 1;
  const int64_t elements = grad.numel() / std::max<int64_t>(channels, 1) * together; // of all rows of such channels
  int64_t share, most; // elements of a row, at the least; rows
  if (grad.is_cpu()) { // no more than one or two thousand elements in the sum of a float: rounding would show
    share = across ? std::min<int64_t>(1024 * together, 32768) : 4096;
    most = grad.numel();
  } else if (across) { // what was fastest on an H200: 4 or 8 blocks for each of 132 multiprocessors, and no remainder
    const int64_t blocks = (c10::elementSize(dtype) == 2 ? 4 : 8) * 132,
                  columns = std::max<int64_t>(channels / together, 1);
    share = 8192;
    most = (columns > blocks / 8 ? 8 : 1) * blocks / columns;
  } else {
    share = needs.input || needs.factor || needs.residual ? 4096 : 16384;
    most = 1024;
  }
  return std::max<int64_t>(std::min(elements / share, most), 1);
}

// The gradients of scale_add and scale_add_relu that are needed, in one pass. `input` is needed for the factor's; the
// mask is that of scale_add_relu, whose output had these strides. Gradients of parameters are summed up in two steps:
// the kernel writes rows of partial sums, each of a fixed share of the elements, in the compute type, and then adds up
// the rows.
inline std::vector<at::Tensor> scale_add_backward(
    const char* name,
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& mask,
    at::IntArrayRef strides,
    const Parameter& factor,
    const at::Tensor& value,
    int64_t dim,
    Needs needs) {
  using Op = ops::ScaleAddBackward;
  using WithInput = ops::ScaleAddBackwardFactorValue;
  const auto* factor_tensor = std::get_if<at::Tensor>(&factor);
  if (needs.factor) {
    TORCH_CHECK(factor_tensor != nullptr, name, ": factor must be a tensor where its gradient is needed, got a number");
    TORCH_CHECK(input.defined(), name, ": input must be given where the gradient of factor is needed, got None");
    check_pair(name, "input", input, grad);
  }
  TORCH_CHECK(!needs.value || value.defined(), name, ": value must be a tensor where its gradient is needed, got None");
  if (mask.defined()) check_mask(name, mask, strides, grad);
  int64_t channel = factor_tensor == nullptr ? -1 : channel_dim(name, grad, "factor", *factor_tensor, dim);
  if (needs.value) channel = std::max(channel, channel_dim(name, grad, "value", value, dim));
  const int64_t channels = channel < 0 ? 1 : grad.size(channel);

  Call call{.dtype = needs.factor ? at::result_type(grad, input) : grad.scalar_type()};
  if (needs.input) call.dtype = at::promote_types(call.dtype, result_type(grad, factor));
  const auto options = grad.options().dtype(call.dtype);
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false).resize_outputs(false);
  const bool sum = needs.factor || needs.value;
  const int factor_sum = 0, value_sum = needs.factor ? 1 : 0; // the numbers of the sums
  at::Tensor sums, factor_total, value_total;
  if (sum) {
    call.rows = number_of_rows(grad, channels, channel >= 0 && grad.stride(channel) == 1, call.dtype, needs);
    sums = at::empty({needs.factor + needs.value, call.rows, channels}, grad.options().dtype(compute_type(call.dtype)));
    call.sums = static_cast<char*>(sums.data_ptr());
    call.row_bytes = channels * sums.element_size();
    call.sum_bytes = call.rows * call.row_bytes;
    if (needs.factor) factor_total = empty_total(call.totals[factor_sum], *factor_tensor, call.dtype, options);
    if (needs.value) value_total = empty_total(call.totals[value_sum], value, call.dtype, options);
    const at::Tensor first = sums[0][0];
    config.add_owned_output(broadcast(first, grad.dim(), channel).expand(grad.sizes()));
  }
  std::array<at::Tensor, Op::outputs> outputs; // by input, by residual
  for (int k = 0; k < Op::outputs; ++k) {
    if (!(k == 0 ? needs.input : needs.residual)) continue;
    if (mask.defined()) {
      outputs[k] = at::empty_strided(grad.sizes(), strides, options);
    } else { // as stock PyTorch's result of grad * factor
      Call layout{.dtype = call.dtype};
      outputs[k] = lay_out<ops::Scale>(layout, {}, {grad, Parameter(factor), dim}).output(0);
    }
    config.add_owned_output(outputs[k]);
    call.present.set(k);
  }
  config.add_owned_const_input(grad.to(call.dtype));
  call.present.set(Op::first_tensor);
  if (needs.factor) {
    config.add_owned_const_input(input.to(call.dtype));
    call.present.set(WithInput::first_tensor + 1);
  }
  const auto add_factor = needs.factor ? &add_parameter<WithInput> : &add_parameter<Op>;
  add_factor(config, call, grad, 0, needs.input ? factor : at::Scalar(1), dim);
  if (mask.defined()) {
    // It has no bytes for TensorIterator to address: element n of the output is bit n.
    call.mask = static_cast<uint8_t*>(mask.data_ptr());
    config.add_owned_const_input(
        at::from_blob(call.mask, grad.sizes(), strides, [](void*) {}, mask.options(), mask.device()));
    call.present.set(needs.factor ? WithInput::mask_operand : Op::mask_operand);
  }
  auto iter = config.build();
  call.sums_are_zero = sum && (grad.numel() == 0 || !is_one_plan(iter));
  if (call.sums_are_zero) sums.zero_();
  const auto find_kernel = needs.factor && needs.value ? &kernel<WithInput>
                           : needs.factor              ? &kernel<ops::ScaleAddBackwardFactor>
                           : needs.value               ? &kernel<ops::ScaleAddBackwardValue>
                                                       : &kernel<Op>;
  find_kernel(grad.device().type())(iter, call);

  std::vector<at::Tensor> gradients;
  if (needs.input) gradients.push_back(outputs[0]);
  if (needs.factor) gradients.push_back(as_gradient(factor_total, *factor_tensor));
  if (needs.value) gradients.push_back(as_gradient(value_total, value));
  if (needs.residual) gradients.push_back(outputs[1]);
  return gradients;
}

template <class Factor>
std::vector<at::Tensor> affine_backward(
    const at::Tensor& grad,
    const std::optional<at::Tensor>& input,
    const std::optional<at::Tensor>& mask,
    at::IntArrayRef strides,
    const Factor& factor,
    const std::optional<at::Tensor>& value,
    std::array<bool, 4> needs,
    int64_t dim) {
  return scale_add_backward(
      "scale_add_backward", grad, input.value_or(at::Tensor()), mask.value_or(at::Tensor()), strides, factor,
      value.value_or(at::Tensor()), dim, {needs[0], needs[1], needs[2], needs[3]});
}

inline at::Tensor scale_backward_factor(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& factor, int64_t dim) {
  return scale_add_backward("scale_backward_factor", grad, input, {}, {}, factor, {}, dim, {.factor = true})[0];
}

inline at::Tensor add_scalar_backward_value(const at::Tensor& grad, const at::Tensor& value, int64_t dim) {
  return scale_add_backward(
      "add_scalar_backward_value", grad, {}, {}, {}, at::Scalar(1), value, dim, {.value = true})[0];
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
  Call call{.dtype = dtype};
  call.present.set(0).set(Op::first_tensor).set(Op::first_tensor + 1);
  kernel<Op>(grad.device().type())(iter, call);
  return iter.output(0);
}

} // namespace my_cuda_op
