// The pybind11 module my_cuda_op._C: the dispatcher's operators as plain functions, for calls from Python that cost
// little. Each goes through the dispatcher, and so is right for every kind of tensor: fake, batched, dual, conjugate,
// on any device.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/utils/pybind.h> // torch/extension.h takes three times as long to compile

#include <complex>
#include <string>
#include <variant>

namespace my_cuda_op {
namespace {

bool needs_derivative(const at::Tensor& tensor) {
  return (c10::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined();
}
template <class T>
bool needs_derivative(const T&) {
  return false;
}

template <class Signature>
struct Operator;

template <class Result, class... Arguments>
struct Operator<Result(Arguments...)> {
  // A Python function that calls the operator. Where there is no derivative to record it passes over autograd's
  // dispatch keys, whose kernels are written in Python; function transforms stack levels of their own and always go the
  // whole way.
  static auto bind(const char* name, const char* overload = "") {
    const auto handle = c10::Dispatcher::singleton()
                            .findSchemaOrThrow((std::string("my_cuda_op::") + name).c_str(), overload)
                            .typed<Result(Arguments...)>();
    return [handle](Arguments... arguments) -> Result {
      const bool transformed =
          c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
      if (transformed || (needs_derivative(arguments) || ...)) return handle.call(arguments...);
      const at::AutoDispatchBelowAutograd guard;
      return handle.call(arguments...);
    };
  }
};

using at::Scalar;
using at::Tensor;

// What Python may give as a parameter; at::Scalar itself does not load from Python.
using Parameter = std::variant<Tensor, bool, int64_t, double, std::complex<double>>;

template <class Number>
Scalar to_scalar(const Number& number) {
  if constexpr (std::is_same_v<Number, std::complex<double>>) {
    return c10::complex<double>(number.real(), number.imag());
  } else {
    return number;
  }
}

// A Python function for the two overloads of an operator with a parameter.
template <class Result, class Input>
auto bind_parametrized(const char* name) {
  return [with_tensor = Operator<Result(Input, const Tensor&, int64_t)>::bind(name, "Tensor"),
          with_number = Operator<Result(Input, const Scalar&, int64_t)>::bind(name)](
             Input input, const Parameter& parameter, int64_t dim) -> Result {
    return std::visit(
        [&](const auto& given) -> Result {
          if constexpr (std::is_same_v<decltype(given), const Tensor&>) {
            return with_tensor(input, given, dim);
          } else {
            return with_number(input, to_scalar(given), dim);
          }
        },
        parameter);
  };
}

} // namespace
} // namespace my_cuda_op

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace my_cuda_op;
  using pybind11::arg;
  const pybind11::call_guard<pybind11::gil_scoped_release> no_gil;

  m.doc() =
      "The operators of my_cuda_op, forward and backward, on CPU and CUDA. my_cuda_op.functional is what to call: "
      "it explains itself, takes everything a number can be, and works under torch.compile.";

  m.def(
      "scale", bind_parametrized<Tensor, const Tensor&>("scale"), no_gil, arg("input"), arg("factor"), arg("dim") = 1,
      "input * factor; factor is a number, or a tensor of one element or of one for each index of dim");
  m.def(
      "scale_", bind_parametrized<void, Tensor&>("scale_"), no_gil, arg("input"), arg("factor"), arg("dim") = 1,
      "input *= factor, as scale");
  m.def(
      "scale_backward_factor",
      Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t)>::bind("scale_backward_factor"), no_gil,
      arg("grad"), arg("input"), arg("factor"), arg("dim") = 1,
      "The gradient of scale's factor: grad * input.conj(), summed to the shape of factor");

  m.def(
      "add_scalar", bind_parametrized<Tensor, const Tensor&>("add_scalar"), no_gil, arg("input"), arg("value"),
      arg("dim") = 1, "input + value; value is a number, or a tensor of one element or of one for each index of dim");
  m.def(
      "add_scalar_", bind_parametrized<void, Tensor&>("add_scalar_"), no_gil, arg("input"), arg("value"),
      arg("dim") = 1, "input += value, as add_scalar");
  m.def(
      "add_scalar_backward_value",
      Operator<Tensor(const Tensor&, const Tensor&, int64_t)>::bind("add_scalar_backward_value"), no_gil, arg("grad"),
      arg("value"), arg("dim") = 1, "The gradient of add_scalar's value: grad, summed to the shape of value");

  m.def("relu", Operator<Tensor(const Tensor&)>::bind("relu"), no_gil, arg("input"), "max(input, 0); NaN stays NaN");
  m.def("relu_", Operator<void(Tensor&)>::bind("relu_"), no_gil, arg("input"), "input = max(input, 0)");
  m.def(
      "relu_backward", Operator<Tensor(const Tensor&, const Tensor&)>::bind("relu_backward"), no_gil, arg("grad"),
      arg("result"), "The gradient of relu's input: grad where result > 0 (or NaN), else 0");

  m.def(
      "check_inplace",
      [](const Tensor& tensor) { torch::autograd::check_inplace(tensor, c10::GradMode::is_enabled()); }, arg("tensor"),
      "Raises what an in-place operation of stock PyTorch would for a leaf, or a view, that must not change");
  m.attr("__version__") = MY_CUDA_OP_VERSION;
  m.attr("torch_version") = MY_CUDA_OP_TORCH_VERSION;
#ifdef MY_CUDA_OP_CUDA_VERSION
  m.attr("cuda_version") = MY_CUDA_OP_CUDA_VERSION;
  m.attr("cuda_archs") = MY_CUDA_OP_CUDA_ARCHS;
#else
  m.attr("cuda_version") = "";
  m.attr("cuda_archs") = "";
#endif
}
