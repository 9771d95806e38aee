// A call of a planned step that needs only its arguments from Python: conditions, begin, ops, and finish in one call.
//
// After a step, hardly any code and data of the interpreter are in the caches, and a dozen Python frames around a step
// cost more than their work. In exceptional cases the call returns NotImplemented, with nothing changed, and the caller
// runs the step from Python. So does every call after `num_calls`, since audits and the watch for drift are in Python.

#include "bindings.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <chrono>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;

class DirectCall {
 public:
  // `returned` makes the step's result from the values of `finish`; without it, the only value is the result.
  DirectCall(const std::vector<py::object>& conditions, py::object step, py::object returned, int num_calls)
      : step_(step.cast<hocket::BoundStep*>()), returned_(std::move(returned)), left_(num_calls), pid_(getpid()) {
    for (const auto& condition : conditions) conditions_.push_back(condition.cast<hocket::Condition*>());
    kept_ = conditions;
    kept_.push_back(std::move(step));
  }

  py::object call(const py::object& batch) {
    // In a forked child the lanes' threads are gone.
    if (left_ == 0 || getpid() != pid_) return not_now();
    const auto start = std::chrono::steady_clock::now();
    for (auto* condition : conditions_)
      if (!condition->holds(batch.ptr())) return not_now();
    if (!step_->begin(batch.ptr())) return not_now();
    left_--;
    step_->run();
    py::list found = step_->finish();
    py::object result = returned_.is_none() ? py::object(found[0]) : returned_(std::move(found));
    times_ms_.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    return result;
  }

  // The times of the calls so far.
  const std::vector<double>& times_ms() const { return times_ms_; }

 private:
  static py::object not_now() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

  hocket::BoundStep* step_;
  py::object returned_;
  int left_;
  pid_t pid_;
  std::vector<hocket::Condition*> conditions_;
  std::vector<py::object> kept_;
  std::vector<double> times_ms_;
};

// A call of a region: the same with a list of inputs, which is emptied before the ops run, so that each input is freed
// after its last use. The result consists of computed values, inputs and constants.
class BoxedCall {
 public:
  // `order`: the place of each output among the computed values, the inputs at `passed`, and the constants, in this order.
  BoxedCall(py::object condition, py::object step, std::vector<Py_ssize_t> passed, const py::list& constants,
            std::vector<size_t> order, int num_calls)
      : condition_(condition.cast<hocket::Condition*>()), step_(step.cast<hocket::BoundStep*>()),
        passed_(std::move(passed)), order_(std::move(order)), left_(num_calls), pid_(getpid()) {
    for (const auto& constant : constants) constants_.push_back(py::reinterpret_borrow<py::object>(constant));
    kept_ = {std::move(condition), std::move(step)};
  }

  py::object call(const py::list& inputs) {
    if (left_ == 0 || getpid() != pid_) return not_now();
    const auto start = std::chrono::steady_clock::now();
    if (!condition_->holds(inputs.ptr()) || !step_->begin(inputs.ptr())) return not_now();
    left_--;
    std::vector<py::object> others;
    others.reserve(passed_.size() + constants_.size());
    for (const Py_ssize_t place : passed_)
      others.push_back(py::reinterpret_borrow<py::object>(PyList_GET_ITEM(inputs.ptr(), place)));
    others.insert(others.end(), constants_.begin(), constants_.end());
    if (PyList_SetSlice(inputs.ptr(), 0, PyList_GET_SIZE(inputs.ptr()), nullptr) != 0) throw py::error_already_set();
    step_->run();
    const py::list found = step_->finish();
    py::tuple result(order_.size());
    for (size_t i = 0; i < order_.size(); i++) {
      const size_t place = order_[i];
      result[i] = place < found.size() ? py::object(found[place]) : others.at(place - found.size());
    }
    times_ms_.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    return result;
  }

  const std::vector<double>& times_ms() const { return times_ms_; }

 private:
  static py::object not_now() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

  hocket::Condition* condition_;
  hocket::BoundStep* step_;
  std::vector<Py_ssize_t> passed_;
  std::vector<size_t> order_;
  int left_;
  pid_t pid_;
  std::vector<py::object> constants_, kept_;
  std::vector<double> times_ms_;
};

}  // namespace

namespace hocket {

void bind_direct(py::module& module) {
  py::class_<Condition>(module, "Condition");
  py::class_<BoundStep>(module, "BoundStep");
  py::class_<DirectCall>(module, "DirectCall")
      .def(py::init<const std::vector<py::object>&, py::object, py::object, int>())
      .def("__call__", torch::wrap_pybind_function(&DirectCall::call))
      .def("times_ms", &DirectCall::times_ms);
  py::class_<BoxedCall>(module, "BoxedCall")
      .def(py::init<py::object, py::object, std::vector<Py_ssize_t>, const py::list&, std::vector<size_t>, int>())
      .def("__call__", torch::wrap_pybind_function(&BoxedCall::call))
      .def("times_ms", &BoxedCall::times_ms);
}

}  // namespace hocket
