#pragma once
// The operators as C++ functions on tensors, without autograd: what the dispatcher runs on CPU and on CUDA. library.cpp
// gives their schemas, my_cuda_op/reference.py says what each must equal.

#include <ATen/core/Tensor.h>

#include <variant>

namespace my_cuda_op {

// A factor or a value: a number; or a tensor of one element, or with one for each channel (the input's dimension
// `dim`).
using Parameter = std::variant<at::Tensor, at::Scalar>;

at::Tensor scale(const at::Tensor& input, const Parameter& factor, int64_t dim);
void scale_(const at::Tensor& input, const Parameter& factor, int64_t dim);
at::Tensor add_scalar(const at::Tensor& input, const Parameter& value, int64_t dim);
void add_scalar_(const at::Tensor& input, const Parameter& value, int64_t dim);
at::Tensor relu(const at::Tensor& input);
void relu_(const at::Tensor& input);

// The gradient of a tensor parameter, in its shape and dtype: a sum over everything that shares an element of it.
at::Tensor scale_backward_factor(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& factor, int64_t dim);
at::Tensor add_scalar_backward_value(const at::Tensor& grad, const at::Tensor& value, int64_t dim);
at::Tensor relu_backward(const at::Tensor& grad, const at::Tensor& result);

} // namespace my_cuda_op
