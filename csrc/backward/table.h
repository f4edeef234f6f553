#pragma once
// The backward kernels: those that no forward kernel can stand in for. cpu.cpp and cuda.cu instantiate each for their
// device.

#include "kernel.h"

namespace my_cuda_op {

using BackwardOps = OpList<ops::ScaleBackwardFactor, ops::AddScalarBackwardValue, ops::ReLUBackward>;

} // namespace my_cuda_op
