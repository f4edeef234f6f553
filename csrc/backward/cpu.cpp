#include "elementwise_cpu.h"

namespace my_cuda_op {

static const bool registered = register_kernels<cpu::Launcher>(c10::kCPU, ops::Backward{});

} // namespace my_cuda_op
