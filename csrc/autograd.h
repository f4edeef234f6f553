#pragma once
// How autograd records a plain call: with a node in C++, whose derivative is the backward of the operator's
// torch.autograd.Function, in Python. The Function's own apply does the same for every kind of tensor, and takes longer
// than a small kernel.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h> // torch/extension.h takes three times as long to compile

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace my_cuda_op {

using torch::autograd::Node;
using NodePtr = decltype(std::declval<Node&>().getptr()); // intrusive since torch 2.13, shared before

// What the derivative is made of. my_cuda_op/autograd.py registers one for each operator.
struct Function {
  pybind11::object setup_context, backward;
  std::string node_name;
};

// By the operator's name. Never destroyed: Python is gone before the statics of a library are.
inline Function& function_of(const std::string& name) {
  static auto* functions = new std::map<std::string, Function>;
  return (*functions)[name];
}

// The ctx of the Function's static methods. They may give it attributes of their own.
struct Context {
  Context(Node* node, std::vector<int>&& edges) : node(node), edges(std::move(edges)) {}
  Context(const Context&) = delete;

  Node* node; // null once that is gone
  std::vector<int> edges; // of each argument in the node; -1 for what is not a tensor
  std::vector<torch::autograd::SavedVariable> saved;
  bool in_backward = false;

  void save_for_backward(const pybind11::args& tensors) {
    for (const auto& object : tensors) {
      const auto tensor = object.is_none() ? at::Tensor() : THPVariable_Unpack(object.ptr());
      saved.emplace_back(tensor, /*is_output=*/tensor.defined() && tensor.grad_fn().get() == node);
    }
  }

  Node& alive() const {
    TORCH_CHECK(node != nullptr, "ctx: the graph that it belongs to must be alive, but is gone");
    return *node;
  }

  pybind11::tuple saved_tensors() const {
    pybind11::tuple tensors(saved.size());
    for (size_t i = 0; i < saved.size(); ++i) tensors[i] = pybind11::cast(saved[i].unpack(alive().getptr()));
    return tensors;
  }

  pybind11::tuple needs_input_grad() const {
    pybind11::tuple needs(edges.size());
    for (size_t i = 0; i < edges.size(); ++i) {
      // In backward the engine knows more: torch.autograd.grad may ask for some gradients only.
      needs[i] = edges[i] >= 0 &&
                 (in_backward ? alive().task_should_compute_output(edges[i]) : alive().should_compute_output(edges[i]));
    }
    return needs;
  }
};

class FunctionNode : public Node {
 public:
  FunctionNode(const Function& function, torch::autograd::edge_list&& edges, std::vector<int> edge_of_argument)
      : Node(std::move(edges)),
        function_(function),
        context_(new Context(this, std::move(edge_of_argument))),
        object_(pybind11::cast(context_, pybind11::return_value_policy::take_ownership)) {}
  ~FunctionNode() override {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    const pybind11::gil_scoped_acquire gil;
    context_->node = nullptr;
    object_ = {};
  }

  const pybind11::object& context() const {
    return object_;
  }
  std::string name() const override {
    return function_.node_name;
  }
  void release_variables() override {
    for (auto& variable : context_->saved) variable.reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "compiled autograd must trace every call of my_cuda_op from its forward, got ", name(),
        ", which was recorded outside torch.compile: compile what calls it, too");
  }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const pybind11::gil_scoped_acquire gil;
    context_->in_backward = true;
    pybind11::object result = function_.backward(object_, grads[0]);
    if (!PyTuple_Check(result.ptr())) result = pybind11::make_tuple(result);
    TORCH_CHECK(
        PyTuple_GET_SIZE(result.ptr()) == static_cast<Py_ssize_t>(context_->edges.size()), name(),
        ": backward must return a gradient for each of ", context_->edges.size(), " arguments, got ",
        PyTuple_GET_SIZE(result.ptr()));
    torch::autograd::variable_list by_input(num_outputs());
    for (size_t i = 0; i < context_->edges.size(); ++i) {
      PyObject* grad = PyTuple_GET_ITEM(result.ptr(), i);
      if (context_->edges[i] >= 0 && grad != Py_None) by_input[context_->edges[i]] = THPVariable_Unpack(grad);
    }
    return by_input;
  }

  const Function& function_;
  Context* context_;
  pybind11::object object_; // the same as Python has it, and its owner
};

template <class FunctionNode, class... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, FunctionNode>) {
    return c10::make_intrusive<FunctionNode>(std::forward<Arguments>(arguments)...);
  } else {
    // deleteNode takes a long graph apart without recursion.
    return NodePtr(new FunctionNode(std::forward<Arguments>(arguments)...), [](auto* node) { deleteNode(node); });
  }
}

// Tells torch.autograd.graph.node_creation_hook, where torch has it.
template <class NodePtr>
auto created(const NodePtr& node, int) -> decltype(fire_node_creation_hooks(node)) {
  fire_node_creation_hooks(node);
}
template <class NodePtr>
void created(const NodePtr&, long) {}

// Makes `output` the result of calling the operator with these arguments. Where the operator wrote a mask, the Function
// is told of both.
inline void record(
    const Function& function, const at::Tensor& output, const at::Tensor& mask, const pybind11::tuple& arguments) {
  torch::autograd::edge_list edges;
  std::vector<int> edge_of_argument(arguments.size(), -1);
  for (size_t i = 0; i < arguments.size(); ++i) {
    PyObject* argument = PyTuple_GET_ITEM(arguments.ptr(), i);
    if (!THPVariable_Check(argument)) continue;
    const auto& tensor = THPVariable_Unpack(argument);
    edge_of_argument[i] = static_cast<int>(edges.size());
    edges.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor) : torch::autograd::Edge());
  }
  const NodePtr node = make_node<FunctionNode>(function, std::move(edges), std::move(edge_of_argument));
  torch::autograd::set_history(output, node);
  const auto& context = static_cast<FunctionNode&>(*node).context();
  if (mask.defined()) {
    function.setup_context(context, arguments, pybind11::make_tuple(output, mask));
  } else {
    function.setup_context(context, arguments, output);
  }
  created(node, 0);
}

inline void define_autograd(pybind11::module_& module) {
  using namespace pybind11;
  class_<Context>(module, "Context", dynamic_attr(), "What the derivative of a recorded call is told")
      .def("save_for_backward", &Context::save_for_backward)
      .def(
          "save_for_forward", [](const Context&, const args&) {}, "Nothing: a call in forward mode is not plain")
      .def(
          "set_materialize_grads", [](const Context&, bool) {}, "Nothing: a gradient that is undefined is None")
      .def_property_readonly("saved_tensors", &Context::saved_tensors)
      .def_property_readonly("needs_input_grad", &Context::needs_input_grad);
  module.def(
      "set_derivative",
      [](const std::string& op, const object& function) {
        function_of(op) = {
            function.attr("setup_context"), function.attr("backward"),
            function.attr("__name__").cast<std::string>() + "Backward"};
      },
      arg("op"), arg("function"), "The torch.autograd.Function that has the operator's derivative");
}

} // namespace my_cuda_op
