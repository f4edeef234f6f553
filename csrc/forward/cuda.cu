#include "elementwise.cuh"
#include "forward/table.h"

namespace my_cuda_op {

static const bool registered = register_kernels<cuda::Launcher>(c10::kCUDA, ForwardOps{});

} // namespace my_cuda_op
