// The table of contents: every operator of the package, for the dispatcher and for Python. my_cuda_op/library.py adds
// what is written in Python: autograd, vmap, fake tensors, and what runs on devices without kernels.

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "backward/backward.h"
#include "bindings.h"
#include "forward/forward.h"

namespace my_cuda_op {
namespace {

using at::Scalar;
using at::Tensor;

template <class Parameter>
constexpr const char* kType = std::is_same_v<Parameter, Tensor> ? "Tensor" : "Scalar";

// "name.overload(arguments"
std::string schema(const char* name, const std::string& overload, const std::string& arguments) {
  return name + (overload.empty() ? "" : "." + overload) + "(" + arguments;
}

// One parameter, in a tensor or as a number; out of place and in place.
template <class Op, class Value, class Define>
void define_parametrized(const Define& define, const char* doc, const char* doc_) {
  const std::string overload = std::is_same_v<Value, Tensor> ? "Tensor" : "";
  const auto rest = " input, " + std::string(kType<Value>) + " " + Op::parameter_names[0] + ", int dim=1) -> ";
  define(schema(Op::name, overload, "Tensor" + rest + "Tensor"), parametrized<Op, Value>, doc);
  define(
      schema((Op::name + std::string("_")).c_str(), overload, "Tensor(a!)" + rest + "()"), parametrized_<Op, Value>,
      doc_);
}

// factor, value and perhaps a residual.
template <class Op, class Factor, class Value, class Define>
void define_affine(const Define& define, const std::string& overload, const char* doc) {
  const auto rest = " input, " + std::string(kType<Factor>) + " factor, " + kType<Value> +
                    " value, Tensor? residual=None, int dim=1) -> ";
  define(schema(Op::name, overload, "Tensor" + rest + "Tensor"), affine<Op, Factor, Value>, doc);
  define(
      schema((Op::name + std::string("_")).c_str(), overload, "Tensor(a!)" + rest + "()"), affine_<Op, Factor, Value>,
      "the same in place");
  if constexpr (Op::writes_mask) {
    define(
        schema((Op::name + std::string("_masked")).c_str(), overload, "Tensor" + rest + "(Tensor, Tensor)"),
        affine_masked<Op, Factor, Value>, "the same, and one bit for each element: does its gradient pass?");
  }
}
template <class Op, class Define>
void define_affine(const Define& define, const char* doc) {
  define_affine<Op, Tensor, Tensor>(define, "Tensor", doc);
  define_affine<Op, Tensor, Scalar>(define, "Tensor_Scalar", doc);
  define_affine<Op, Scalar, Tensor>(define, "Scalar_Tensor", doc);
  define_affine<Op, Scalar, Scalar>(define, "", doc);
}

// Calls define(schema, function, docstring) for each operator. One function serves both devices: what differs between
// them begins at kernel<Op>(device). A parameter is a number, a tensor of one element, or a tensor with one element for
// each index of dim.
template <class Define>
void operators(const Define& define) {
  define_parametrized<ops::Scale, Tensor>(define, "input * factor", "input *= factor");
  define_parametrized<ops::Scale, Scalar>(define, "input * factor", "input *= factor");
  define(
      "scale_backward_factor(Tensor grad, Tensor input, Tensor factor, int dim=1) -> Tensor", scale_backward_factor,
      "grad * input.conj(), summed to the shape of factor");

  define_parametrized<ops::AddScalar, Tensor>(define, "input + value", "input += value");
  define_parametrized<ops::AddScalar, Scalar>(define, "input + value", "input += value");
  define(
      "add_scalar_backward_value(Tensor grad, Tensor value, int dim=1) -> Tensor", add_scalar_backward_value,
      "grad, summed to the shape of value");

  define("relu(Tensor input) -> Tensor", unary<ops::ReLU>, "max(input, 0); NaN stays NaN");
  define("relu_(Tensor(a!) input) -> ()", unary_<ops::ReLU>, "input = max(input, 0)");
  define(
      "relu_backward(Tensor grad, Tensor result) -> Tensor", backward_by_result<ops::ReLUBackward>,
      "grad where result > 0 or is NaN, else 0");

  define_affine<ops::ScaleAdd>(define, "input * factor + value (+ residual)");
  define_affine<ops::ScaleAddReLU>(define, "max(input * factor + value (+ residual), 0)");
  const std::string before = "Tensor grad, Tensor? input, Tensor? mask, SymInt[] strides, ",
                    after = " factor, Tensor? value, bool[4] needs, int dim=1) -> Tensor[]";
  const char* doc =
      "Those gradients of scale_add (and with a mask scale_add_relu) by input, factor, value and residual that are "
      "needed, in one pass; strides: of the output, where there is a mask";
  define(schema("scale_add_backward", "Tensor", before + "Tensor" + after), affine_backward<Tensor>, doc);
  define(schema("scale_add_backward", "", before + "Scalar" + after), affine_backward<Scalar>, doc);
}

// "my_cuda_op::scale", "Tensor" of the schema scale.Tensor(...)
c10::OperatorName operator_name(const std::string& schema) {
  const auto name = schema.substr(0, schema.find('('));
  const auto dot = name.find('.');
  return {"my_cuda_op::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
}

// torch.library records derivatives of operators that return new tensors only. Rather than drop one, an operator in
// place sends its caller to the function that does record it.
void refuse_derivative(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto name = op.schema().name().substr(sizeof("my_cuda_op::") - 1);
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    TORCH_CHECK(
        !argument.isTensor() || !needs_derivative(argument.toTensor()), "torch.ops.my_cuda_op.", name,
        ": no argument must need a derivative, got one that does; my_cuda_op.functional.", name, " records it");
  }
  const at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Counts the change of an operator in place in its input's version, by which autograd knows that what it saved is gone.
void count_change(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Tensor input = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  torch::autograd::increment_version(input);
}

// A negative or conjugate view in place: works on a copy without the bit. PyTorch's own fallback for them takes for
// granted that an operator in place returns its input, and reads freed memory of one that does not.
void resolve_views(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const Tensor input = torch::jit::peek(*stack, 0, count).toTensor();
  for (size_t i = 0; i < count; ++i) {
    auto& argument = torch::jit::peek(*stack, i, count);
    if (argument.isTensor()) argument = argument.toTensor().resolve_conj().resolve_neg();
  }
  const Tensor resolved = torch::jit::peek(*stack, 0, count).toTensor();
  op.callBoxed(stack);
  if (!resolved.is_same(input)) input.copy_(resolved);
}

} // namespace
} // namespace my_cuda_op

TORCH_LIBRARY(my_cuda_op, m) {
  my_cuda_op::operators([&](const std::string& schema, auto* function, const char*) {
    m.def(schema.c_str());
    const auto name = schema.substr(0, schema.find('('));
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, function));
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CUDA, function));
    if (schema.find('!') == std::string::npos) return; // not in place
    using torch::CppFunction;
    const std::pair<c10::DispatchKey, CppFunction (*)()> boxed[] = {
        {c10::DispatchKey::Autograd, CppFunction::makeFromBoxedFunction<&my_cuda_op::refuse_derivative>},
        {c10::DispatchKey::ADInplaceOrView, CppFunction::makeFromBoxedFunction<&my_cuda_op::count_change>},
        {c10::DispatchKey::Negative, CppFunction::makeFromBoxedFunction<&my_cuda_op::resolve_views>},
        {c10::DispatchKey::Conjugate, CppFunction::makeFromBoxedFunction<&my_cuda_op::resolve_views>},
    };
    for (const auto& [key, make] : boxed) m.impl(name.c_str(), torch::dispatch(key, make()));
  });
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() =
      "The operators of my_cuda_op, forward and backward, on CPU and CUDA. my_cuda_op.functional is what to call: "
      "it explains itself, takes everything a number can be, and works under torch.compile.";
  auto plain = m.def_submodule(
      "plain",
      "The operators where nothing but the kernel is asked for, and a record of the call for backward; None, with "
      "nothing done, where more is");
  std::set<std::string> names;
  my_cuda_op::operators([&](const std::string& schema, auto* function, const char* doc) {
    const auto name = my_cuda_op::operator_name(schema);
    const auto short_name = name.name.substr(name.name.rfind(':') + 1);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    my_cuda_op::bind(m, plain, op, doc, function);
    names.insert(short_name);
  });
  for (const auto& name : names) plain.def(name.c_str(), [](const pybind11::args&) { return pybind11::none(); });

  my_cuda_op::define_autograd(m);
  m.def(
      "is_dual", [](const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); },
      pybind11::arg("tensor"),
      "Does the tensor carry a tangent? (torch.autograd.forward_ad does not count a level that a compiler traces.)");
  m.def(
      "check_inplace",
      [](const at::Tensor& tensor) { torch::autograd::check_inplace(tensor, c10::GradMode::is_enabled()); },
      pybind11::arg("tensor"),
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
