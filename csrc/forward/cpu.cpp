#include "elementwise_cpu.h"
#include "forward/table.h"

namespace my_cuda_op {

static const bool registered = register_kernels<cpu::Launcher>(c10::kCPU, ForwardOps{});

} // namespace my_cuda_op
