// A tensor that requires a gradient, with a graph that the step's backward has freed: a second backward raises.

#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace hocket {

class SpentNode : public torch::autograd::Node {
 public:
  SpentNode(std::string name, std::string message) : name_(std::move(name)), message_(std::move(message)) {}
  std::string name() const override { return name_; }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    throw std::runtime_error(message_);
  }

 private:
  std::string name_, message_;
};

// A pointer to a new node: a shared one up to torch 2.12, an intrusive one from 2.13 on.
template <class Pointer>
Pointer made_node(std::string name, std::string message) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<SpentNode>(std::move(name), std::move(message));
  else
    return c10::make_intrusive<SpentNode>(std::move(name), std::move(message));
}

inline void give_spent_graph(const at::Tensor& tensor, std::string name, std::string message) {
  auto node = made_node<decltype(torch::autograd::Edge::function)>(std::move(name), std::move(message));
  node->add_input_metadata(tensor);
  torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::Edge(std::move(node), 0));
}

}  // namespace hocket
