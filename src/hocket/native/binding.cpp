// Bindings: the reads of Python state before the first op of a planned step, and the writes after the last.
//
// `Captured.begin` and `Captured.finish` are the reference in Python. If anything differs from the state in which the
// binding was made, `begin` returns false, has changed nothing, and these two run instead.
//
//   begin    batch, places, gradients --> slots      numbers at places --> tape --> numbers of the ops
//            gradients that no op reads are dropped, so that their memory is free during the step
//   finish   slots --> gradients; what the step returns, binds anew and counts is handed back as Python objects

#include "bindings.h"
#include "objects.h"
#include "shared_memory.h"
#include "slots.h"
#include "spent_graph.h"
#include "tape.h"

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <string>
#include <vector>

namespace {

namespace py = pybind11;
using c10::IValue;
using hocket::Number;

struct Input {
  int slot, place;  // of a gradient: that of its parameter
  hocket::Meta meta;
};

struct Result {
  char kind;
  int index;
  std::string name, message;
};

class Binding : public hocket::Places, public hocket::BoundStep {
 public:
  Binding(std::shared_ptr<hocket::Slots> slots, const py::object& batch)
      : slots_(std::move(slots)), pattern_(batch.ptr()) {}

  bool fits(const py::object& batch) { return pattern_.read(batch.ptr(), leaves_); }

  py::list leaves(const py::object& batch) {
    py::list found;
    if (pattern_.read(batch.ptr(), leaves_))
      for (PyObject* leaf : leaves_) found.append(py::reinterpret_borrow<py::object>(leaf));
    return found;
  }

  // Inputs with one `memory` share it, all others must not. A tensor from outside of the batch must keep its kind.
  void add_batch_input(int slot, int leaf, int memory) {
    batch_inputs_.emplace_back(slot, leaf);
    memory_.add(memory);
  }
  void add_input(int slot, int place, int memory) {
    inputs_.push_back({slot, place, hocket::Meta(tensor_at(place))});
    memory_.add(memory);
  }
  void add_gradient_input(int slot, int parameter, int memory) {
    gradient_inputs_.push_back({slot, parameter, hocket::Meta(gradient_of(parameter))});
    memory_.add(memory);
  }
  // These places hold the same tensor.
  void add_twins(int place, int other) { twins_.emplace_back(place, other); }
  void add_unread_gradient(int parameter) { unread_.push_back(parameter); }
  // After the step; slot -1: no gradient.
  void add_gradient(int parameter, int slot) { gradients_.emplace_back(parameter, slot); }

  // The source of the next leaf of the tape: 'p' a number at a place, 'i' the number in the tensor there, 'b' a leaf of
  // the batch, 'g' a number that guards have read of the batch.
  void add_number(char kind, int index, const py::object& found) {
    const auto number = Number::of_leaf(found.ptr());
    if (!number) throw py::type_error("a number that is no float and no small int");
    tape_.add_leaf(static_cast<int>(sources_.size()), *number);
    sources_.emplace_back(kind, index);
  }
  void add_entry(char sign, py::object function, const std::vector<std::pair<std::string, py::object>>& operands) {
    tape_.add_entry(sign, std::move(function), operands);
  }
  void add_guard(int entry, py::object outcome) { tape_.add_guard(entry, std::move(outcome)); }

  void expect_numbers(std::vector<size_t> leaves) { tape_.expect(std::move(leaves)); }

  // A result of `finish`: 't' the tensor in a slot, 'd' the same detached, 'g' with a freed graph, 'l' as a leaf that
  // requires a gradient, 'i' the number in it, 'n' a number of the tape.
  void add_result(char kind, int index, std::string name, std::string message) {
    results_.push_back({kind, index, std::move(name), std::move(message)});
  }

  bool begin(PyObject* batch) override { return slots_->is_free() && begin(batch, py::list()); }
  void run() override { slots_->run_begun(); }

  // Read all inputs. `of_batch`: the numbers that guards have read of the batch. False: nothing was changed.
  bool begin(PyObject* batch, const py::list& of_batch) {
    if (!pattern_.read(batch, leaves_) || !read_numbers(of_batch) || !read()) return false;
    for (const auto& [place, other] : twins_)
      if (at(place) != at(other)) return false;
    // In the order in which they were added.
    memory_.start();
    for (const auto& [slot, leaf] : batch_inputs_) {
      PyObject* value = leaves_[static_cast<size_t>(leaf)];
      if (!THPVariable_Check(value) || !memory_.next(THPVariable_Unpack(value))) return false;
    }
    for (const auto& input : inputs_) {
      if (!THPVariable_Check(at(input.place))) return false;
      const auto& tensor = tensor_at(input.place);
      if (!input.meta.holds(tensor) || !memory_.next(tensor)) return false;
    }
    for (const auto& input : gradient_inputs_) {
      const auto& gradient = gradient_of(input.place);
      if (!gradient.defined() || !input.meta.holds(gradient) || !memory_.next(gradient)) return false;
    }
    if (!memory_.holds()) return false;
    slots_->is_taken_ = true;
    auto& values = slots_->slots_;
    for (const auto& [slot, leaf] : batch_inputs_)
      values[static_cast<size_t>(slot)] = THPVariable_Unpack(leaves_[static_cast<size_t>(leaf)]);
    for (const auto& input : inputs_) values[static_cast<size_t>(input.slot)] = tensor_at(input.place);
    for (const auto& input : gradient_inputs_) values[static_cast<size_t>(input.slot)] = gradient_of(input.place);
    for (const int parameter : unread_) tensor_at(parameter).mutable_grad().reset();
    return true;
  }

  py::list finish() override {
    slots_->is_taken_ = false;
    for (const auto& [parameter, slot] : gradients_) {
      if (slot < 0) {
        tensor_at(parameter).mutable_grad().reset();
        continue;
      }
      auto& value = slots_->slots_[static_cast<size_t>(slot)];
      const auto& tensor = tensor_at(parameter);
      auto gradient = detached(value.toTensor());
      if (gradient.sizes() == tensor.sizes() && gradient.dtype() == tensor.dtype() &&
          gradient.device() == tensor.device()) {
        tensor.mutable_grad() = std::move(gradient);
      } else {
        py::handle(at(parameter)).attr("grad") = py::cast(gradient);  // raises torch's own error
      }
    }
    py::list found(results_.size());
    for (size_t i = 0; i < results_.size(); i++) found[i] = result_of(results_[i]);
    slots_->clear();
    return found;
  }

 private:
  const at::Tensor& tensor_at(int place) const { return THPVariable_Unpack(at(place)); }

  const at::Tensor& gradient_of(int parameter) const { return tensor_at(parameter).unsafeGetTensorImpl()->grad(); }

  // Programs leave `detach` out, so a detached parameter is the parameter itself, or a view of it here. Autograd's
  // gradients are no views: `p.grad.detach_()` raises for a view.
  static at::Tensor detached(const at::Tensor& tensor) {
    return tensor.requires_grad() || tensor.is_view() ? tensor.detach() : tensor;
  }

  // First, since only this may call Python: values that are read later are valid until the step begins.
  bool read_numbers(const py::list& of_batch) {
    if (sources_.empty()) {
      slots_->numbers_.clear();
      return true;
    }
    if (!read()) return false;
    numbers_.clear();
    for (const auto& [kind, index] : sources_) {
      const auto place = static_cast<size_t>(index);
      std::optional<Number> number;
      switch (kind) {
        case 'p': number = Number::of(at(index)); break;
        case 'i': number = item_of(at(index)); break;
        case 'b': number = Number::of_leaf(leaves_[place]); break;
        default:
          if (place < of_batch.size()) number = Number::of(of_batch[place].ptr());
      }
      if (!number) return false;
      numbers_.push_back(*number);
    }
    if (!tape_.evaluate(numbers_)) return false;
    auto& found = slots_->numbers_;
    found.resize(tape_.size());
    for (const size_t i : tape_.distinct()) found[i] = value_of(tape_.value(i));
    for (size_t i = 0; i < found.size(); i++)
      if (tape_.same_as()[i] != i) found[i] = found[tape_.same_as()[i]];
    return true;
  }

  static std::optional<Number> item_of(PyObject* value) {
    if (!THPVariable_Check(value)) return {};
    const auto& tensor = THPVariable_Unpack(value);
    if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided || tensor.numel() != 1 || tensor.is_neg()) return {};
    switch (tensor.scalar_type()) {
      case c10::kFloat: return Number(static_cast<double>(*tensor.const_data_ptr<float>()));
      case c10::kDouble: return Number(*tensor.const_data_ptr<double>());
      case c10::kLong: return Number(*tensor.const_data_ptr<int64_t>());
      default: return {};
    }
  }

  static IValue value_of(const Number& number) {
    switch (number.kind) {
      case Number::Kind::floating:
      case Number::Kind::scalar: return number.floating;
      case Number::Kind::whole: return number.whole;
      case Number::Kind::truth: return number.whole != 0;
      case Number::Kind::object: break;
    }
    return hocket::as_number(number.object);
  }

  py::object result_of(const Result& result) const {
    const auto place = static_cast<size_t>(result.index);
    if (result.kind == 'n') return tape_.value(place).boxed();
    const auto& tensor = slots_->slots_[place].toTensor();
    if (result.kind == 't') return py::cast(detached(tensor));
    // A tensor with no other reference needs no new object, unless it is a view of a tensor that requires a gradient.
    const bool is_own = tensor.use_count() == 1 && result.kind != 'i' && !tensor.requires_grad();
    auto own = is_own ? tensor : tensor.detach();
    if (result.kind == 'g') hocket::give_spent_graph(own, result.name, result.message);
    if (result.kind == 'l') own.requires_grad_();
    return result.kind == 'i' ? py::cast(own).attr("item")() : py::cast(own);
  }

  std::shared_ptr<hocket::Slots> slots_;
  hocket::BatchPattern pattern_;
  std::vector<std::pair<int, int>> batch_inputs_, gradients_, twins_;
  std::vector<Input> inputs_, gradient_inputs_;
  hocket::SharedMemory memory_;
  std::vector<int> unread_;
  std::vector<std::pair<char, int>> sources_;
  std::vector<Result> results_;
  hocket::Tape tape_;
  std::vector<Number> numbers_;
  std::vector<PyObject*> leaves_;
};

}  // namespace

namespace hocket {

// A number as an IValue for ops. None if it is no number or too large, such as the outcome of a guard or an intermediate
// value; an op that reads it fails.
IValue as_number(PyObject* value) {
  if (PyBool_Check(value)) return value == Py_True;
  if (PyUnicode_Check(value)) return {};
  if (PyIndex_Check(value)) {
    int overflow = 0;
    const auto whole = py::reinterpret_steal<py::object>(PyNumber_Index(value));
    if (!whole) throw py::error_already_set();
    const int64_t number = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
    return overflow ? IValue() : IValue(number);
  }
  const double number = PyFloat_AsDouble(value);
  if (!PyErr_Occurred()) return number;
  PyErr_Clear();
  return {};
}

void bind_binding(py::module& module) {
  py::class_<Binding, Places, BoundStep>(module, "Binding")
      .def(py::init<std::shared_ptr<Slots>, const py::object&>())
      .def("fits", &Binding::fits)
      .def("leaves", &Binding::leaves)
      .def("add_batch_input", &Binding::add_batch_input)
      .def("add_input", &Binding::add_input)
      .def("add_gradient_input", &Binding::add_gradient_input)
      .def("add_twins", &Binding::add_twins)
      .def("add_unread_gradient", &Binding::add_unread_gradient)
      .def("add_gradient", &Binding::add_gradient)
      .def("add_number", &Binding::add_number)
      .def("add_entry", &Binding::add_entry)
      .def("add_guard", &Binding::add_guard)
      .def("expect_numbers", &Binding::expect_numbers)
      .def("add_result", &Binding::add_result)
      .def("begin", [](Binding& binding, const py::object& batch,
                       const py::list& of_batch) { return binding.begin(batch.ptr(), of_batch); })
      .def("finish", torch::wrap_pybind_function(&Binding::finish));
  module.def("with_spent_graph", [](const at::Tensor& tensor, std::string name, std::string message) {
    give_spent_graph(tensor, std::move(name), std::move(message));
    return tensor;
  });
}

}  // namespace hocket
