#pragma once
// A TensorIterator in plain numbers, so that what nvcc compiles needs no tensor headers: they take longer to compile
// than the kernels.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

#include "kernel.h"

namespace at {
struct TensorIteratorBase;
}

namespace my_cuda_op {

constexpr int kMaxDims = 25; // as many as stock PyTorch's CUDA kernels take

// Dimensions go from the fastest to the slowest, merged where every operand allows it; strides are in bytes.
struct Plan {
  c10::Device device = c10::kCPU;
  int64_t numel = 0;
  int ndim = 0;
  int operands = 0;
  int64_t sizes[kMaxDims];
  struct Operand {
    char* data;
    c10::ScalarType dtype;
    int64_t strides[kMaxDims];
  } operand[kMaxOperands];
};

// Can one plan have all of it?
bool is_one_plan(const at::TensorIteratorBase& iter);

// Calls f with the iterator's plan, or, where offsets do not fit into 32 bits, with the plans of parts for which they
// do. One-dimensional work whose operands are contiguous or uniform is never split.
void for_each_plan(at::TensorIteratorBase& iter, c10::function_ref<void(const Plan&)> f);

} // namespace my_cuda_op
