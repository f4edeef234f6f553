#include "plan.h"

#include <ATen/TensorIterator.h>

namespace my_cuda_op {
namespace {

Plan make_plan(const at::TensorIteratorBase& iter) {
  TORCH_CHECK(
      iter.ndim() <= kMaxDims, "a tensor must have at most ", kMaxDims, " dimensions that cannot be merged, got ",
      iter.ndim());
  TORCH_INTERNAL_ASSERT(iter.ntensors() <= kMaxOperands);
  Plan plan;
  plan.device = iter.device(0);
  plan.numel = iter.numel();
  plan.ndim = iter.ndim();
  plan.operands = iter.ntensors();
  std::copy(iter.shape().begin(), iter.shape().end(), plan.sizes);
  for (int k = 0; k < plan.operands; ++k) {
    auto& operand = plan.operand[k];
    operand.data = static_cast<char*>(iter.data_ptr(k));
    operand.dtype = iter.dtype(k);
    std::copy(iter.strides(k).begin(), iter.strides(k).end(), operand.strides);
  }
  return plan;
}

bool is_flat(const at::TensorIteratorBase& iter) {
  if (iter.ndim() > 1) return false;
  for (int k = 0; k < iter.ntensors(); ++k) {
    const int64_t stride = iter.ndim() == 0 ? 0 : iter.strides(k)[0];
    if (stride != 0 && stride != iter.element_size(k)) return false;
  }
  return true;
}

} // namespace

bool is_one_plan(const at::TensorIteratorBase& iter) {
  return is_flat(iter) || iter.can_use_32bit_indexing();
}

void for_each_plan(at::TensorIteratorBase& iter, c10::function_ref<void(const Plan&)> f) {
  if (is_one_plan(iter)) {
    f(make_plan(iter));
  } else {
    for (auto& part : iter.with_32bit_indexing()) f(make_plan(part));
  }
}

} // namespace my_cuda_op
