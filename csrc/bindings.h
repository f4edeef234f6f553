#pragma once
// How an operator of the dispatcher becomes a pybind11 function. library.cpp says which.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "autograd.h"

namespace my_cuda_op {

inline bool needs_derivative(const at::Tensor& tensor) {
  return (c10::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined();
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
  return THPVariable_CheckExact(object) && !at::impl::torch_function_mode_enabled() && !is_transformed() &&
         !THPVariable_Unpack(object)._fw_grad(/*level=*/0).defined();
}

// A Python number. (at::Scalar does not load from Python; and pybind11's own double takes whatever has a __float__,
// among it an integer that is too large, for which stock PyTorch raises.)
struct Number {
  at::Scalar value;
  pybind11::handle object;
};

// How Python gives an argument of a schema, and how it is passed on.
template <class Argument>
using FromPython = std::conditional_t<std::is_same_v<Argument, const at::Scalar&>, Number, Argument>;
template <class Argument>
using FromPythonPlain =
    std::conditional_t<std::is_same_v<Argument, const at::Tensor&>, PlainTensor, FromPython<Argument>>;

template <class Given>
auto& pass(Given& given) {
  if constexpr (std::is_same_v<Given, PlainTensor>) {
    return std::as_const(given.tensor);
  } else if constexpr (std::is_same_v<Given, Number>) {
    return given.value;
  } else {
    return given;
  }
}

// The argument as Python gave it.
template <class Given>
pybind11::object as_given(const Given& given) {
  if constexpr (std::is_integral_v<Given>) {
    return pybind11::int_(given);
  } else {
    return pybind11::reinterpret_borrow<pybind11::object>(given.object);
  }
}

// The name, and for a dim its default, as the schema has them.
template <class Argument>
auto named(const c10::Argument& argument) {
  if constexpr (std::is_same_v<Argument, int64_t>) {
    return pybind11::arg(argument.name().c_str()) = argument.default_value()->toInt();
  } else {
    return pybind11::arg(argument.name().c_str());
  }
}

// Defines the operator in the module, and in `plain`: there a call that is for nothing but the kernel takes the
// shortest way. Every call goes through the dispatcher, and so is right for fake, batched, dual and conjugate tensors.
template <class Result, class... Arguments>
void bind(
    pybind11::module_& module,
    pybind11::module_& plain,
    const char* name,
    const c10::OperatorHandle& op,
    const char* doc,
    Result (*)(Arguments...)) {
  const auto handle = op.typed<Result(Arguments...)>();
  auto argument = op.schema().arguments().begin(); // braces, unlike a call's parentheses, fix the order of evaluation
  const std::tuple arguments{named<Arguments>(*argument++)...};
  const pybind11::call_guard<pybind11::gil_scoped_release> no_gil;
  const auto call = [handle](FromPython<Arguments>... given) -> Result {
    if (is_transformed() || (needs_derivative(given) || ...)) return handle.call(pass(given)...);
    const at::AutoDispatchBelowAutograd guard; // autograd's kernel is Python, and there is nothing to record
    return handle.call(pass(given)...);
  };
  std::apply([&](const auto&... named) { module.def(name, call, no_gil, named..., doc); }, arguments);
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    plain.def(name, [handle, &function = function_of(name)](FromPythonPlain<Arguments>... given) -> Result {
      at::Tensor output;
      {
        const pybind11::gil_scoped_release no_gil;
        const at::AutoDispatchBelowAutograd guard;
        output = handle.call(pass(given)...);
      }
      if ((needs_derivative(pass(given)) || ...)) record(function, output, pybind11::make_tuple(as_given(given)...));
      return output;
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
