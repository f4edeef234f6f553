#pragma once
// How an operator of the dispatcher becomes a pybind11 function. library.cpp says which.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "autograd.h"

namespace my_cuda_op {

inline bool needs_derivative(const at::Tensor& tensor) {
  // In InferenceMode nothing is recorded, also where grad mode is on.
  const bool records = c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  return (records && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined();
}
inline bool needs_derivative(const std::optional<at::Tensor>& tensor) {
  return tensor && needs_derivative(*tensor);
}
template <class T>
bool needs_derivative(const T&) {
  return false;
}

// By torch.func, whose transforms stack levels of their own.
inline bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// A tensor for which nothing but the kernel is asked for, and perhaps a record of the call: no subclass or mode that
// wants to see it, no transform, no forward mode.
struct PlainTensor {
  at::Tensor tensor;
  pybind11::handle object;
};
inline bool is_plain(PyObject* object) {
  if (!THPVariable_CheckExact(object) || at::impl::torch_function_mode_enabled() || is_transformed() ||
      torch::jit::tracer::isTracing()) {
    return false;
  }
  const auto& tensor = THPVariable_Unpack(object);
  constexpr c10::DispatchKeySet batched{c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched};
  return !tensor.key_set().has_any(batched) && !tensor._fw_grad(/*level=*/0).defined();
}

// A Python number. (at::Scalar does not load from Python; and pybind11's own double takes whatever has a __float__,
// among it an integer that is too large, for which stock PyTorch raises.)
struct Number {
  at::Scalar value;
  pybind11::handle object;
};

// How Python gives an argument of a schema; how it is passed on; and the object that was given.
template <class Argument>
using FromPython = std::conditional_t<std::is_same_v<Argument, const at::Scalar&>, Number, Argument>;
template <class Argument>
using FromPythonPlain = std::conditional_t<
    std::is_same_v<Argument, const at::Tensor&>,
    PlainTensor,
    std::conditional_t<
        std::is_same_v<Argument, const std::optional<at::Tensor>&>,
        std::optional<PlainTensor>,
        FromPython<Argument>>>;

template <class Given>
decltype(auto) pass(Given& given) {
  if constexpr (std::is_same_v<Given, PlainTensor>) {
    return std::as_const(given.tensor);
  } else if constexpr (std::is_same_v<Given, std::optional<PlainTensor>>) {
    return given ? std::optional(given->tensor) : std::nullopt;
  } else if constexpr (std::is_same_v<Given, Number>) {
    return std::as_const(given.value);
  } else {
    return (given);
  }
}

inline pybind11::object as_given(const PlainTensor& given) {
  return pybind11::reinterpret_borrow<pybind11::object>(given.object);
}
inline pybind11::object as_given(const std::optional<PlainTensor>& given) {
  return given ? as_given(*given) : pybind11::none();
}
inline pybind11::object as_given(const Number& given) {
  return pybind11::reinterpret_borrow<pybind11::object>(given.object);
}
inline pybind11::object as_given(int64_t given) {
  return pybind11::int_(given);
}

// The name, and the default where the schema has one.
template <class Argument>
auto named(const c10::Argument& argument) {
  if constexpr (std::is_same_v<Argument, int64_t>) {
    return pybind11::arg(argument.name().c_str()) = argument.default_value()->toInt();
  } else if constexpr (std::is_same_v<Argument, const std::optional<at::Tensor>&>) {
    return pybind11::arg(argument.name().c_str()) = pybind11::none();
  } else {
    return pybind11::arg(argument.name().c_str());
  }
}

template <class F>
auto without_gil(const F& f) {
  const pybind11::gil_scoped_release no_gil;
  return f();
}

// Defines the operator in the module, and in `plain`: there a call that is for nothing but the kernel takes the
// shortest way. Every call goes through the dispatcher, and so is right for fake, batched, dual and conjugate tensors.
template <class Result, class... Arguments>
void bind(
    pybind11::module_& module,
    pybind11::module_& plain,
    const c10::OperatorHandle& op,
    const char* doc,
    Result (*)(Arguments...)) {
  const auto& operator_name = op.operator_name();
  const std::string name = operator_name.name.substr(sizeof("my_cuda_op::") - 1);
  const auto handle = op.typed<Result(Arguments...)>();
  auto argument = op.schema().arguments().begin(); // braces, unlike a call's parentheses, fix the order of evaluation
  const std::tuple arguments{named<Arguments>(*argument++)...};
  const pybind11::call_guard<pybind11::gil_scoped_release> no_gil;
  const auto call = [handle](FromPython<Arguments>... given) -> Result {
    if (is_transformed() || (needs_derivative(given) || ...)) return handle.call(pass(given)...);
    const at::AutoDispatchBelowAutograd guard; // autograd's kernel is Python, and there is nothing to record
    return handle.call(pass(given)...);
  };
  std::apply([&](const auto&... named) { module.def(name.c_str(), call, no_gil, named..., doc); }, arguments);

  if constexpr (std::is_same_v<Result, at::Tensor>) {
    // With a mask, where there is such an operator, a call is recorded for the fewest bytes.
    using Masked = std::tuple<at::Tensor, at::Tensor>(Arguments...);
    std::optional<c10::TypedOperatorHandle<Masked>> masked;
    if (const auto op =
            c10::Dispatcher::singleton().findSchema({operator_name.name + "_masked", operator_name.overload_name})) {
      masked = op->template typed<Masked>();
    }
    plain.def(name.c_str(), [handle, masked, &function = function_of(name)](FromPythonPlain<Arguments>... given) {
      const bool is_recorded = (needs_derivative(pass(given)) || ...);
      const auto [output, mask] = without_gil([&]() -> std::tuple<at::Tensor, at::Tensor> {
        const at::AutoDispatchBelowAutograd guard;
        if (is_recorded && masked) return masked->call(pass(given)...);
        return {handle.call(pass(given)...), at::Tensor()};
      });
      if (is_recorded) record(function, output, mask, pybind11::make_tuple(as_given(given)...));
      return output;
    });
  } else if constexpr (!std::is_void_v<Result>) { // of several tensors: no operator that is recorded has those
    plain.def(name.c_str(), [handle](FromPythonPlain<Arguments>... given) -> pybind11::object {
      if ((needs_derivative(pass(given)) || ...)) return pybind11::none();
      const at::AutoDispatchBelowAutograd guard;
      return pybind11::cast(without_gil([&] { return handle.call(pass(given)...); }));
    });
  }
}

} // namespace my_cuda_op

template <>
struct pybind11::detail::type_caster<my_cuda_op::PlainTensor> {
  PYBIND11_TYPE_CASTER(my_cuda_op::PlainTensor, const_name("torch.Tensor"));
  bool load(handle source, bool) {
    if (!my_cuda_op::is_plain(source.ptr())) return false;
    value = {THPVariable_Unpack(source.ptr()), source};
    return true;
  }
};

template <>
struct pybind11::detail::type_caster<my_cuda_op::Number> {
  PYBIND11_TYPE_CASTER(my_cuda_op::Number, const_name("Number"));
  bool load(handle source, bool) {
    PyObject* object = source.ptr();
    value.object = source;
    if (PyBool_Check(object)) {
      value.value = object == Py_True;
    } else if (PyLong_Check(object)) {
      int overflow = 0;
      value.value = static_cast<int64_t>(PyLong_AsLongLongAndOverflow(object, &overflow));
      return overflow == 0;
    } else if (PyFloat_Check(object)) {
      value.value = PyFloat_AS_DOUBLE(object);
    } else if (PyComplex_Check(object)) {
      value.value = c10::complex<double>(PyComplex_RealAsDouble(object), PyComplex_ImagAsDouble(object));
    } else {
      return false;
    }
    return true;
  }
};
