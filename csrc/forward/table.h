#pragma once
// The forward kernels. cpu.cpp and cuda.cu instantiate each of them for their device.

#include "kernel.h"

namespace my_cuda_op {

using ForwardOps = OpList<ops::Scale, ops::AddScalar, ops::ReLU>;

} // namespace my_cuda_op
