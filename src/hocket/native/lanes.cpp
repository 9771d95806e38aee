// Native lanes: a plan's ops called through the dispatcher, without the interpreter and its lock.
//
// Python passes the actions of each lane once: the operators, the recipes of their arguments from constants, slots and
// numbers, the actions that they wait for, and the slots that they free. Then a step is one call: inputs go into slots,
// all workers start, and the kept slots are returned. The first worker is the caller's own thread; see
// execution/native/thread_assignment.py for the threads of the lanes.
//
//   caller  ---run---> worker 0 ............................ join ---> kept slots
//                 \--> worker 1 (a thread of the process's crew) /
//
// See steps.h for waits, and for steps that are left in the middle. Words of channel ops are set from outside (`arrived`).

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "actions.h"
#include "affinity.h"
#include "bindings.h"
#include "crew.h"
#include "memory.h"
#include "slots.h"
#include "steps.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <variant>
#include <vector>

namespace {

using namespace hocket;

// Warnings of ops on any thread go through Python's filters. A filter that makes one an error ends the step.
struct PythonWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    py::gil_scoped_acquire locked;
    const bool is_deprecation = std::holds_alternative<c10::Warning::DeprecationWarning>(warning.type());
    auto* kind = is_deprecation ? PyExc_DeprecationWarning : PyExc_UserWarning;
    if (PyErr_WarnEx(kind, warning.msg().c_str(), 1) >= 0) return;
    python_error error;
    error.persist();
    throw error;
  }
};

class Core : public hocket::Slots, public hocket::CrewTask, public std::enable_shared_from_this<Core> {
 public:
  Core(int num_slots, int num_words, std::vector<int> users)
      : steps_(num_words), counters_(users.size()), users_(std::move(users)) {
    slots_.resize(num_slots);
    hocket::KeptMemory::instance();
  }

  ~Core() {
    slots_.clear();
    hocket::KeptMemory::instance().close();
  }

  void add_worker() { workers_.push_back(std::make_unique<Worker>()); }

  void add_action(std::string label, int width, std::vector<int> cpus, bool grad_mode, std::vector<int> sleeps, std::vector<int> waits,
                  int word, std::vector<int> frees, std::vector<std::pair<int, int>> shared) {
    auto& worker = *workers_.back();
    Action action;
    action.label = std::move(label);
    action.width = width;
    action.cpus = std::move(cpus);
    action.moves = worker.actions.empty() || worker.actions.back().width != action.width ||
                   worker.actions.back().cpus != action.cpus;
    action.grad_mode = grad_mode;
    action.sleeps = std::move(sleeps);
    action.waits = std::move(waits);
    action.word = word;
    action.frees = std::move(frees);
    action.shared = std::move(shared);
    worker.actions.push_back(std::move(action));
    worker.times.resize(2 * worker.actions.size());
  }

  // See `call_of` in actions.h.
  void add_call(const std::string& name, const std::string& overload, const py::list& arguments,
                std::vector<std::pair<int, int>> outs) {
    workers_.back()->actions.back().calls.push_back(call_of(name, overload, arguments, std::move(outs)));
  }

  // The last call is a view of the tensor in slot `base` with the same shape in each step.
  void stands(int base) {
    Call& call = workers_.back()->actions.back().calls.back();
    call.view = static_cast<int>(views_.size());
    views_.emplace_back(base, call.outs.at(0).second);
  }

  // Find the threads of each worker except the first, which is the caller's.
  void start() {
    for (size_t i = 1; i < workers_.size(); ++i) {
      const auto& actions = workers_[i]->actions;
      const auto widest = std::max_element(actions.begin(), actions.end(),
                                           [](const auto& one, const auto& other) { return one.width < other.width; });
      const bool is_idle = widest == actions.end();
      auto& crew = hocket::Crew::instance();
      workers_[i]->group = is_idle ? crew.group(1, {}) : crew.group(widest->width, widest->cpus);
    }
  }

  void close() {
    is_closed_ = true;
    abort("the lanes were closed");
  }

  // Sleep until an action of a step has completed; false if the step was left.
  bool await(int word, uint32_t epoch) {
    py::gil_scoped_release unlocked;
    return steps_.await(word, epoch);
  }

  // A channel op of a step has arrived: wake the actions that wait for it, and free the slots that it reads last. Called
  // with the interpreter's lock, as `clear` is: a step may be left at this moment.
  void arrived(int word, uint32_t epoch, const std::vector<int>& frees, const std::vector<std::pair<int, int>>& shared) {
    for (int slot : frees) slots_[slot] = IValue();
    steps_.done(word, epoch);
    for (auto [counter, slot] : shared) count_off(counter, slot);
  }

  // Leave the step in progress, from outside; no further step runs.
  void abort(const std::string& why) { steps_.abort(std::make_exception_ptr(std::runtime_error(why))); }

  at::Tensor slot(int number) const { return slots_[number].toTensor(); }
  void put(int number, at::Tensor value) { slots_[number] = std::move(value); }

  py::list run(const py::list& values, const py::list& numbers, const std::vector<int>& inputs,
               const std::vector<int>& kept) {
    fill(values, numbers, inputs);
    run_begun();
    return take(kept);
  }

  // The parts of `run`, for steps with channels, which may read the slots until they learn that a step was left.

  void fill(const py::list& values, const py::list& numbers, const std::vector<int>& inputs) {
    is_taken_ = true;
    reset_counters();
    for (int slot : inputs) {
      py::detail::make_caster<at::Tensor> tensor;
      if (tensor.load(values[slot], false)) slots_[slot] = py::detail::cast_op<at::Tensor&>(tensor);
    }
    numbers_.clear();
    for (const auto& number : numbers) {
      PyObject* value = number.ptr();
      numbers_.push_back(hocket::as_number(value));
    }
  }

  py::list take(const std::vector<int>& kept) {
    py::list result;
    for (int slot : kept) result.append(torch::jit::toPyObject(slots_[slot]));
    clear();
    return result;
  }

  void step() {
    py::gil_scoped_release unlocked;
    run_step();
  }

  void run_begun() override {
    reset_counters();
    try {
      step();
    } catch (...) {
      left_.clear();
      for (const int slot : effects_) left_.push_back(slots_[slot]);
      clear();
      throw;
    }
  }

  std::vector<std::vector<int64_t>> times() const {
    std::vector<std::vector<int64_t>> result;
    for (const auto& worker : workers_) {
      std::vector<int64_t> relative;
      relative.reserve(worker->times.size());
      for (int64_t time : worker->times) relative.push_back(time - began_ns_);
      result.push_back(std::move(relative));
    }
    return result;
  }

  // The slots of gradients that a step leaves behind if an op raises, and their values in the last step that raised.
  void set_effects(std::vector<int> slots) { effects_ = std::move(slots); }
  py::list left() {
    py::list result;
    for (const IValue& value : left_) result.append(torch::jit::toPyObject(value));
    left_.clear();
    return result;
  }

  // Worker and action of the error that `run` raised last.
  std::pair<int, int> failed() const { return failed_; }

 private:
  // Before any action of a step begins, since a transfer may complete before the first op.
  void reset_counters() {
    for (size_t i = 0; i < users_.size(); ++i) counters_[i].store(users_[i], std::memory_order_relaxed);
  }

  // One reader of a slot is done; the last one frees it.
  void count_off(int counter, int slot) {
    if (counters_[counter].fetch_sub(1, std::memory_order_acq_rel) == 1) slots_[slot] = IValue();
  }

  void run_step() {
    Usual usual(is_retuned_);
    const int64_t spin_ns = workers_[0]->actions.size() > 1 ? kSpinNs : 0;  // a caller that only waits needs no core
    RECORD_USER_SCOPE("hocket step");
    const bool is_profiled = at::hasThreadLocalCallbacks() || at::hasGlobalCallbacks();
    profiled_ = is_profiled ? std::make_unique<at::ThreadLocalState>() : nullptr;
    began_ns_ = last_poll_ns_ = now_ns();
    claim();
    const uint32_t epoch = steps_.begin();
    for (size_t i = 1; i < workers_.size(); ++i) members_[i - 1]->ring(shared_from_this(), i, epoch);
    run_worker(0, epoch, usual.current, true);
    steps_.join(static_cast<uint32_t>(workers_.size() - 1), spin_ns, [&] { poll(epoch, now_ns()); });
    raise_failure(epoch);
  }

  void claim() {
    members_.clear();
    try {
      for (size_t i = 1; i < workers_.size(); ++i) members_.push_back(&workers_[i]->group->claim());
    } catch (...) {  // a thread cannot be started
      for (auto* member : members_) member->release();
      throw;
    }
  }

  void work(size_t worker, uint32_t epoch, cpu_set_t& cpus) override { run_worker(worker, epoch, cpus, false); }
  void finish() override { steps_.finish(); }

  void raise_failure(uint32_t epoch) {
    const Steps::Failure failure = steps_.failure(epoch);
    failed_ = {failure.worker, failure.action};
    if (failure.why) std::rethrow_exception(failure.why);
  }

  void run_worker(size_t number, uint32_t epoch, cpu_set_t& cpus, bool on_caller) {
    Worker& worker = *workers_[number];
    std::optional<at::ThreadLocalStateGuard> as_caller;
    if (profiled_ && !on_caller) as_caller.emplace(*profiled_);
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
    c10::AutoGradMode mode(false);
    hocket::KeptMemory::Use kept;
    PythonWarnings warnings;
    c10::WarningUtils::WarningHandlerGuard warned(&warnings);
    std::vector<IValue> stack;
    size_t at = 0;
    try {
      for (; at < worker.actions.size(); ++at) {
        Action& action = worker.actions[at];
        for (int word : action.sleeps) wait(word, epoch, {kYieldNs, true}, on_caller);
        for (int word : action.waits) wait(word, epoch, {kSpinNs}, on_caller);
        if (steps_.is_left(epoch)) return;
        if (action.moves) {
          // The query makes torch initialise a new thread, whose first op would otherwise undo the setting.
          if (at::get_num_threads() != action.width) {
            at::set_num_threads(action.width);
            is_retuned_ = true;
          }
          pin(action.cpus, cpus);
        }
        if (c10::GradMode::is_enabled() != action.grad_mode) c10::GradMode::set_enabled(action.grad_mode);
        const int64_t start = now_ns();
        worker.times[2 * at] = start;
        if (profiled_) {
          RECORD_USER_SCOPE(action.label);
          for (const Call& call : action.calls) invoke(call, stack);
        } else {
          for (const Call& call : action.calls) invoke(call, stack);
        }
        for (int slot : action.frees) slots_[slot] = IValue();
        const int64_t end = now_ns();
        worker.times[2 * at + 1] = end;
        if (action.word >= 0) steps_.done(action.word, epoch);
        for (auto [counter, slot] : action.shared) count_off(counter, slot);
        if (on_caller) poll(epoch, end);
      }
    } catch (...) {
      steps_.fail(epoch, {std::current_exception(), static_cast<int>(number), static_cast<int>(at)});
    }
  }

  void invoke(const Call& call, std::vector<IValue>& stack) {
    if (call.view >= 0 && views_[call.view].put(slots_)) return;
    stack.clear();
    for (const auto& argument : call.arguments) stack.push_back(value_of(argument, slots_, numbers_));
    call.op.callBoxed(&stack);
    for (auto [position, slot] : call.outs) {
      if (position < 0) {
        slots_[slot] = std::move(stack[0]);
      } else if (stack.size() == 1 && stack[0].isList()) {
        slots_[slot] = stack[0].toListRef()[position];
      } else {
        slots_[slot] = std::move(stack[position]);
      }
    }
    if (call.view >= 0) views_[call.view].keep(slots_);
  }

  void wait(int word, uint32_t epoch, hocket::Spin how, bool on_caller) {
    steps_.wait(word, epoch, how, on_caller ? kPollNs : 0, [&] {
      if (on_caller) poll(epoch, now_ns());
    });
  }

  // Let Python run its signal handlers, now and then and on the caller's thread.
  void poll(uint32_t epoch, int64_t time_ns) {
    if (time_ns - last_poll_ns_ < kPollNs || steps_.is_left(epoch)) return;
    last_poll_ns_ = time_ns;
    py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) {
      python_error error;
      error.persist();
      steps_.fail(epoch, {std::make_exception_ptr(error)});
    }
  }

  Steps steps_;
  std::vector<std::atomic<int>> counters_;
  std::vector<int> users_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<int> effects_;
  std::vector<IValue> left_;
  std::vector<CrewMember*> members_;     // of the step in progress
  std::atomic<bool> is_retuned_{false};  // a thread of the step has set torch's number of threads
  std::pair<int, int> failed_{-1, -1};
  std::unique_ptr<at::ThreadLocalState> profiled_;  // the caller's, in a step that torch.profiler looks at
  int64_t began_ns_ = 0;
  int64_t last_poll_ns_ = 0;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<hocket::Slots, std::shared_ptr<hocket::Slots>>(module, "Slots");
  py::class_<Core, hocket::Slots, std::shared_ptr<Core>>(module, "Core")
      .def(py::init<int, int, std::vector<int>>())
      .def("add_worker", &Core::add_worker)
      .def("add_action", &Core::add_action)
      .def("add_call", torch::wrap_pybind_function(&Core::add_call))
      .def("stands", &Core::stands)
      .def("start", torch::wrap_pybind_function(&Core::start))
      .def("close", &Core::close)
      .def("run", torch::wrap_pybind_function(&Core::run))
      .def("fill", torch::wrap_pybind_function(&Core::fill))
      .def("take", torch::wrap_pybind_function(&Core::take))
      .def("await_", &Core::await)
      .def("arrived", &Core::arrived)
      .def("abort", &Core::abort)
      .def("slot", &Core::slot)
      .def("put", &Core::put)
      .def("step", torch::wrap_pybind_function(&Core::step))
      .def("clear", &Core::clear)
      .def("run_begun", torch::wrap_pybind_function(&Core::run_begun))
      .def("is_free", &Core::is_free)
      .def("times", &Core::times)
      .def("set_effects", &Core::set_effects)
      .def("left", &Core::left)
      .def("failed", &Core::failed);
  hocket::bind_direct(module);
  hocket::bind_guards(module);
  hocket::bind_interrupts(module);
  hocket::bind_signature(module);
  hocket::bind_binding(module);
  module.def("kept_bytes", [] { return hocket::KeptMemory::instance().size_bytes(); });
}
