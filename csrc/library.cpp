// The table of contents: every operator of the package as the dispatcher knows it. my_cuda_op/library.py adds what is
// written in Python: autograd, vmap, fake tensors, and the reference expressions that run on devices without kernels.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "operators.h"

TORCH_LIBRARY(my_cuda_op, m) {
  m.def("scale(Tensor input, Scalar factor, int dim=1) -> Tensor");
  m.def("scale.Tensor(Tensor input, Tensor factor, int dim=1) -> Tensor");
  m.def("scale_(Tensor(a!) input, Scalar factor, int dim=1) -> ()");
  m.def("scale_.Tensor(Tensor(a!) input, Tensor factor, int dim=1) -> ()");
  m.def("scale_backward_factor(Tensor grad, Tensor input, Tensor factor, int dim=1) -> Tensor");

  m.def("add_scalar(Tensor input, Scalar value, int dim=1) -> Tensor");
  m.def("add_scalar.Tensor(Tensor input, Tensor value, int dim=1) -> Tensor");
  m.def("add_scalar_(Tensor(a!) input, Scalar value, int dim=1) -> ()");
  m.def("add_scalar_.Tensor(Tensor(a!) input, Tensor value, int dim=1) -> ()");
  m.def("add_scalar_backward_value(Tensor grad, Tensor value, int dim=1) -> Tensor");

  m.def("relu(Tensor input) -> Tensor");
  m.def("relu_(Tensor(a!) input) -> ()");
  m.def("relu_backward(Tensor grad, Tensor result) -> Tensor");
}

namespace my_cuda_op {
namespace {

// The two overloads of an operator with a parameter, a number and a tensor, are one function here.
template <auto function, class Value>
auto with(const at::Tensor& input, const Value& parameter, int64_t dim) {
  return function(input, Parameter(parameter), dim);
}
template <auto function, class Value>
void with_(at::Tensor& input, const Value& parameter, int64_t dim) {
  function(input, Parameter(parameter), dim);
}

// The same functions for both devices: what differs between them begins at kernel<Op>(device).
void implement(torch::Library& m) {
  m.impl("scale", with<scale, at::Scalar>);
  m.impl("scale.Tensor", with<scale, at::Tensor>);
  m.impl("scale_", with_<scale_, at::Scalar>);
  m.impl("scale_.Tensor", with_<scale_, at::Tensor>);
  m.impl("scale_backward_factor", scale_backward_factor);

  m.impl("add_scalar", with<add_scalar, at::Scalar>);
  m.impl("add_scalar.Tensor", with<add_scalar, at::Tensor>);
  m.impl("add_scalar_", with_<add_scalar_, at::Scalar>);
  m.impl("add_scalar_.Tensor", with_<add_scalar_, at::Tensor>);
  m.impl("add_scalar_backward_value", add_scalar_backward_value);

  m.impl("relu", relu);
  m.impl("relu_", [](at::Tensor& input) { relu_(input); });
  m.impl("relu_backward", relu_backward);
}

bool needs_derivative(const at::Tensor& tensor) {
  return tensor.defined() &&
         ((c10::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined());
}

// torch.library records derivatives of operators that return new tensors only. Rather than drop one, an operator in
// place sends its caller to the function that does record it.
void refuse_derivative(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    const auto& name = op.schema().name(); // my_cuda_op::scale_
    TORCH_CHECK(
        !argument.isTensor() || !needs_derivative(argument.toTensor()), "torch.ops.my_cuda_op.",
        name.substr(name.rfind(':') + 1),
        ": no argument must need a derivative, got one that does; "
        "my_cuda_op.functional.",
        name.substr(name.rfind(':') + 1), " records it");
  }
  const at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

} // namespace
} // namespace my_cuda_op

TORCH_LIBRARY_IMPL(my_cuda_op, CPU, m) {
  my_cuda_op::implement(m);
}
TORCH_LIBRARY_IMPL(my_cuda_op, CUDA, m) {
  my_cuda_op::implement(m);
}

TORCH_LIBRARY_IMPL(my_cuda_op, Autograd, m) {
  for (const char* name : {"scale_", "scale_.Tensor", "add_scalar_", "add_scalar_.Tensor", "relu_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&my_cuda_op::refuse_derivative>());
  }
}
TORCH_LIBRARY_IMPL(my_cuda_op, ADInplaceOrView, m) { // counts the change in the tensor's version
  for (const char* name : {"scale_", "scale_.Tensor", "add_scalar_", "add_scalar_.Tensor", "relu_"}) {
    m.impl(name, torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  }
}
