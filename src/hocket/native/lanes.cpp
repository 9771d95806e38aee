// Native lanes: a plan's ops called through the dispatcher, without the interpreter and its lock.
//
// Python hands over, once, for each lane its actions: the operators, how their arguments are put together from
// constants, slots and numbers, which other actions they wait for, and what they may free. A step then is one call:
// inputs into slots, all workers let go, kept slots back. The first worker is the caller's own thread; see workers.py
// for who runs which lanes.
//
//   caller  ---run---> worker 0 ............................ join ---> kept slots
//                 \--> worker 1 (a thread that sleeps between steps) /
//
// A wait is one word per awaited action: it holds the number of the last step that finished the action (see waiting.h).
// Words of channel ops are set from outside (`signal`), perhaps one step ahead, so a wait is for that number or more.

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "actions.h"
#include "bindings.h"
#include "memory.h"
#include "slots.h"
#include "waiting.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using namespace hocket;

class Core : public hocket::Slots, public std::enable_shared_from_this<Core> {
 public:
  Core(int num_slots, int num_words, std::vector<int> users)
      : words_(num_words), counters_(users.size()), users_(std::move(users)) {
    slots_.resize(num_slots);
    hocket::KeptMemory::instance();
  }

  ~Core() {
    slots_.clear();
    hocket::KeptMemory::instance().close();
  }

  void add_worker() { workers_.push_back(std::make_unique<Worker>()); }

  void add_action(int width, std::vector<int> cpus, bool grad_mode, std::vector<int> sleeps, std::vector<int> waits,
                  int word, std::vector<int> frees, std::vector<std::pair<int, int>> shared) {
    auto& worker = *workers_.back();
    Action action;
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

  // One thread for each worker but the first, which is the caller's.
  void start() {
    const int usual = at::get_num_threads();
    for (size_t i = 1; i < workers_.size(); ++i) {
      std::thread([self = shared_from_this(), i] { self->serve(i); }).detach();
      while (ready_.load(std::memory_order_acquire) < i) std::this_thread::yield();
    }
    // A lane's setting is its own, but it is also what torch begins new threads with.
    at::set_num_threads(usual);
    if (failure_) std::rethrow_exception(take_failure());
  }

  void close() {
    is_closed_ = true;
    closing_ = true;
    store_and_wake(step_, step_.load() + 1);
  }

  // Sleeps until an action of a step is done; false if the step was left.
  bool await(int word, uint32_t epoch) {
    py::gil_scoped_release unlocked;
    for (uint32_t seen; !reached(seen = words_[word].load(), epoch);) sleep_on(words_[word], seen, 0);
    return failed_step_.load() != epoch;
  }

  // A channel op of a step has arrived.
  void signal(int word, uint32_t epoch) { store_and_wake(words_[word], epoch); }

  // Ends the step in progress, from outside.
  void abort(const std::string& why) { fail(-1, -1, std::make_exception_ptr(std::runtime_error(why))); }

  at::Tensor slot(int number) const { return slots_[number].toTensor(); }
  void put(int number, at::Tensor value) { slots_[number] = std::move(value); }

  py::list run(const py::list& values, const py::list& numbers, const std::vector<int>& inputs,
               const std::vector<int>& kept) {
    fill(values, numbers, inputs);
    run_begun();
    return take(kept);
  }

  void fill(const py::list& values, const py::list& numbers, const std::vector<int>& inputs) {
    is_taken_ = true;
    for (int slot : inputs) {
      PyObject* value = values[slot].ptr();
      if (THPVariable_Check(value)) slots_[slot] = THPVariable_Unpack(value);
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

  void run_begun() override {
    py::gil_scoped_release unlocked;
    step();
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

  // What the last step took, from before the workers were woken to when the last of them had ended.
  int64_t took_ns() const { return took_ns_; }

  // Worker and action of the error that `run` raised last.
  std::pair<int, int> failed() const { return {failed_worker_, failed_action_}; }

 private:
  void step() {
    failed_worker_ = failed_action_ = -1;
    for (size_t i = 0; i < users_.size(); ++i) counters_[i].store(users_[i], std::memory_order_relaxed);
    const size_t others = workers_.size() - 1;
    finished_.value.store(0, std::memory_order_relaxed);
    const Usual usual(workers_[0]->cpus);
    const int spins = workers_[0]->actions.size() > 1 ? kSpins : 0;  // who only waits needs no core
    began_ns_ = last_poll_ns_ = now_ns();
    const uint32_t epoch = step_.load() + 1;
    store_and_wake(step_, epoch);
    run_worker(0, epoch, true);
    for (uint32_t seen; (seen = finished_.load()) < others;) {
      for (int spin = 0; spin < spins && finished_.load() == seen; ++spin) pause_cpu();
      if (finished_.load() == seen) sleep_on(finished_, seen, kPollNs);
      poll(now_ns());
    }
    took_ns_ = now_ns() - began_ns_;
    if (failure_) {
      const py::gil_scoped_acquire locked;  // a channel may be putting a value into its slot
      clear();
      std::rethrow_exception(take_failure());
    }
  }

  std::exception_ptr take_failure() {
    abort_ = false;
    return std::exchange(failure_, nullptr);
  }

  void serve(size_t number) {
    uint32_t seen = step_.load();
    try {
      // Asking first makes torch initialise this thread; otherwise its first op would undo the setting.
      at::get_num_threads();
      const auto& actions = workers_[number]->actions;
      if (!actions.empty()) {
        pin(actions[0].cpus, workers_[number]->cpus);
        at::set_num_threads(actions[0].width);
      }
    } catch (...) {
      fail(number, -1);
    }
    ready_.fetch_add(1, std::memory_order_release);
    while (true) {
      for (int spin = 0; spin < kIdleSpins && step_.load() == seen; ++spin) pause_cpu();
      while (step_.load() == seen) sleep_on(step_, seen, 0);
      seen = step_.load();
      if (closing_) return;
      run_worker(number, seen, false);
      finished_.value.fetch_add(1);
      wake(finished_);
    }
  }

  void run_worker(size_t number, uint32_t epoch, bool on_caller) {
    Worker& worker = *workers_[number];
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
    c10::AutoGradMode mode(false);
    hocket::KeptMemory::Use kept;
    std::vector<IValue> stack;
    size_t at = 0;
    try {
      for (; at < worker.actions.size(); ++at) {
        Action& action = worker.actions[at];
        for (int word : action.sleeps) wait(words_[word], epoch, 0, on_caller);
        for (int word : action.waits) wait(words_[word], epoch, kSpins, on_caller);
        if (abort_.load(std::memory_order_relaxed)) return;
        if (action.moves) {
          if (at::get_num_threads() != action.width) at::set_num_threads(action.width);
          pin(action.cpus, worker.cpus);
        }
        if (c10::GradMode::is_enabled() != action.grad_mode) c10::GradMode::set_enabled(action.grad_mode);
        const int64_t start = now_ns();
        worker.times[2 * at] = start;
        for (const Call& call : action.calls) invoke(call, stack);
        for (int slot : action.frees) slots_[slot] = IValue();
        const int64_t end = now_ns();
        worker.times[2 * at + 1] = end;
        if (action.word >= 0) store_and_wake(words_[action.word], epoch);
        for (auto [counter, slot] : action.shared) {
          if (counters_[counter].fetch_sub(1, std::memory_order_acq_rel) == 1) slots_[slot] = IValue();
        }
        if (on_caller) poll(end);
      }
    } catch (...) {
      fail(number, at);
    }
  }

  void invoke(const Call& call, std::vector<IValue>& stack) {
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
  }

  void wait(Word& word, uint32_t epoch, int spins, bool on_caller) {
    for (int spin = 0; spin < spins; ++spin) {
      if (reached(word.load(), epoch)) return;
      pause_cpu();
    }
    for (uint32_t seen; !reached(seen = word.load(), epoch);) {
      if (abort_) return;
      sleep_on(word, seen, on_caller ? kPollNs : 0);
      if (on_caller) poll(now_ns());
    }
  }

  // Python runs its signal handlers only where we let it: on the caller's thread, now and then.
  void poll(int64_t time_ns) {
    if (time_ns - last_poll_ns_ < kPollNs || abort_) return;
    last_poll_ns_ = time_ns;
    py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) {
      python_error error;
      error.persist();
      fail(0, -1, std::make_exception_ptr(error));
    }
  }

  void fail(size_t worker, int64_t action, std::exception_ptr why = std::current_exception()) {
    if (!abort_.exchange(true)) {
      failure_ = std::move(why);
      failed_step_ = step_.load();
      failed_worker_ = static_cast<int>(worker);
      failed_action_ = static_cast<int>(action);
      // Everybody who waits must look again.
      for (auto& word : words_) store_and_wake(word, step_.load());
    }
  }

  std::vector<Word> words_;
  std::vector<std::atomic<int>> counters_;
  std::vector<int> users_;
  std::vector<std::unique_ptr<Worker>> workers_;
  Word step_;
  Word finished_;
  std::atomic<size_t> ready_{0};
  std::atomic<bool> abort_{false};
  std::atomic<bool> closing_{false};
  std::exception_ptr failure_;
  std::atomic<uint32_t> failed_step_{0};
  int failed_worker_ = -1;
  int failed_action_ = -1;
  int64_t began_ns_ = 0;
  int64_t took_ns_ = 0;
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
      .def("start", torch::wrap_pybind_function(&Core::start))
      .def("close", &Core::close)
      .def("run", torch::wrap_pybind_function(&Core::run))
      .def("fill", torch::wrap_pybind_function(&Core::fill))
      .def("take", torch::wrap_pybind_function(&Core::take))
      .def("await_", &Core::await)
      .def("signal", &Core::signal)
      .def("abort", &Core::abort)
      .def("slot", &Core::slot)
      .def("put", &Core::put)
      .def("run_begun", torch::wrap_pybind_function(&Core::run_begun))
      .def("took_ns", &Core::took_ns)
      .def("is_free", &Core::is_free)
      .def("times", &Core::times)
      .def("failed", &Core::failed);
  hocket::bind_direct(module);
  hocket::bind_guards(module);
  hocket::bind_interrupts(module);
  hocket::bind_signature(module);
  hocket::bind_binding(module);
  module.def("kept_bytes", [] { return hocket::KeptMemory::instance().size_bytes(); });
}
