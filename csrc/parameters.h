#pragma once
// What forward and backward host code share: how a factor or a value fits its input.

#include <ATen/core/Tensor.h>

#include "operators.h"

namespace my_cuda_op {

struct NamedParameter {
  const char* name; // for the error messages
  const Parameter& value;
};

// torch.result_type(input, parameter as a number or a 0-d tensor): a parameter never widens a floating-point input.
at::ScalarType result_type(const at::Tensor& input, const Parameter& parameter);

// The dimension of the input along which the parameter varies, or -1 for one element. Throws where they do not fit.
int64_t channel_dim(
    const char* op, const at::Tensor& input, const char* name, const at::Tensor& parameter, int64_t dim);

// A view of the parameter, of the input's number of dimensions, that broadcasts against it.
at::Tensor broadcast(const at::Tensor& parameter, int64_t input_dims, int64_t channel_dim);

} // namespace my_cuda_op
