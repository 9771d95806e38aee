// Native lanes: a plan's ops called through the dispatcher, without the interpreter and its lock.
//
// Python hands over, once, for each lane its actions: the operators, how their arguments are put together from
// constants, slots and numbers, which other actions they wait for, and what they may free. A step then is one call:
// inputs into slots, all lanes let go, kept slots back. The first lane runs on the caller's own thread.
//
//   caller  ---run---> lane 0 ............................ join ---> kept slots
//                 \--> lane 1 (a thread that sleeps between steps) /
//
// A wait is one 32-bit word per awaited action: it holds the number of the last step that finished the action. The
// waiter spins for a while and then sleeps on the word (futex), so that an idle lane costs nobody a core.

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

namespace {

using c10::IValue;
using Word = std::atomic<uint32_t>;

constexpr int kSpins = 20'000;              // inside a step: some 0.3 ms, less than what a sleep and a wake-up can cost
constexpr int kIdleSpins = 2'000;           // between steps: the core may be wanted by somebody else
constexpr int64_t kPollNs = 20'000'000;    // how often a long step looks for Ctrl-C

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when the word may have changed from `seen`, or after `timeout_ns` (0: no limit).
void sleep_on(Word& word, uint32_t seen, int64_t timeout_ns) {
  timespec limit{static_cast<time_t>(timeout_ns / 1'000'000'000), static_cast<long>(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, timeout_ns ? &limit : nullptr,
          nullptr, 0);
}

void wake(Word& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// How one argument of an operator is put together.
struct Argument {
  enum class Kind { constant, slot, number, list } kind = Kind::constant;
  IValue constant;                 // constant; for a list: an empty list of the right type
  int index = -1;                  // slot or number
  bool as_float = false;           // a number for an argument of type float
  bool as_tensor = false;          // a number for an argument of type Tensor, as in mul(tensor, 0.9)
  std::vector<Argument> elements;  // list
};

struct Call {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<std::pair<int, int>> outs;  // position in the result (-1: the whole) -> slot
};

struct Action {
  std::vector<Call> calls;
  bool grad_mode = false;
  std::vector<int> waits;                       // words
  int word = -1;                                // its own, if anybody waits for it
  std::vector<int> frees;                       // slots whose last reader it is
  std::vector<std::pair<int, int>> shared;      // counter, slot: freed by whoever comes last
};

struct Lane {
  int width = 1;
  std::vector<int> cpus;
  std::vector<Action> actions;
  std::vector<int64_t> times;  // start and end of each action of the last step
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(int num_slots, int num_words, std::vector<int> users)
      : slots_(num_slots), words_(num_words), counters_(users.size()), users_(std::move(users)) {
    for (auto& word : words_) word = 0;
  }

  void add_lane(int width, std::vector<int> cpus) {
    auto lane = std::make_unique<Lane>();
    lane->width = width;
    lane->cpus = std::move(cpus);
    lanes_.push_back(std::move(lane));
  }

  void add_action(bool grad_mode, std::vector<int> waits, int word, std::vector<int> frees,
                  std::vector<std::pair<int, int>> shared) {
    Action action;
    action.grad_mode = grad_mode;
    action.waits = std::move(waits);
    action.word = word;
    action.frees = std::move(frees);
    action.shared = std::move(shared);
    auto& lane = *lanes_.back();
    lane.actions.push_back(std::move(action));
    lane.times.resize(2 * lane.actions.size());
  }

  // `arguments[i]` is ("c", value), ("s", slot), ("n", number) or ("l", [the same for each element]); None: the default.
  void add_call(const std::string& name, const std::string& overload, const py::list& arguments,
                std::vector<std::pair<int, int>> outs) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& schema = op.schema();
    TORCH_CHECK(arguments.size() == schema.arguments().size(), name, ": expected ", schema.arguments().size(),
                " arguments, got ", arguments.size());
    Call call{op, {}, std::move(outs)};
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& formal = schema.arguments()[i];
      if (arguments[i].is_none()) {
        TORCH_CHECK(formal.default_value(), name, ": argument ", formal.name(), " is missing");
        Argument argument;
        argument.constant = *formal.default_value();
        call.arguments.push_back(std::move(argument));
      } else {
        call.arguments.push_back(argument_of(arguments[i].cast<py::tuple>(), formal.type()));
      }
    }
    lanes_.back()->actions.back().calls.push_back(std::move(call));
  }

  // Whether lane 0 runs on the caller's thread; otherwise the caller only waits.
  void start(bool on_caller) {
    on_caller_ = on_caller;
    const int usual = at::get_num_threads();
    for (size_t i = on_caller ? 1 : 0; i < lanes_.size(); ++i) {
      std::thread([self = shared_from_this(), i] { self->serve(i); }).detach();
      while (ready_.load(std::memory_order_acquire) < i + (on_caller ? 0 : 1)) std::this_thread::yield();
    }
    // A lane's setting is its own, but it is also what torch begins new threads with.
    at::set_num_threads(usual);
    if (failure_) std::rethrow_exception(take_failure());
  }

  void close() {
    closing_ = true;
    step_.fetch_add(1);
    wake(step_);
  }

  py::list run(const py::list& values, const py::list& numbers, const std::vector<int>& inputs,
               const std::vector<int>& kept) {
    for (int slot : inputs) {
      PyObject* value = values[slot].ptr();
      if (THPVariable_Check(value)) slots_[slot] = THPVariable_Unpack(value);
    }
    numbers_.clear();
    for (const auto& number : numbers) {
      PyObject* value = number.ptr();
      if (PyBool_Check(value)) {
        numbers_.emplace_back(value == Py_True);
      } else if (PyLong_Check(value)) {
        numbers_.emplace_back(static_cast<int64_t>(PyLong_AsLongLong(value)));
      } else {
        numbers_.emplace_back(PyFloat_AsDouble(value));
      }
    }
    {
      py::gil_scoped_release unlocked;
      step();
    }
    py::list result;
    for (int slot : kept) result.append(torch::jit::toPyObject(slots_[slot]));
    for (auto& slot : slots_) slot = IValue();
    return result;
  }

  std::vector<std::vector<int64_t>> times() const {
    std::vector<std::vector<int64_t>> result;
    for (const auto& lane : lanes_) {
      std::vector<int64_t> relative;
      relative.reserve(lane->times.size());
      for (int64_t time : lane->times) relative.push_back(time - began_ns_);
      result.push_back(std::move(relative));
    }
    return result;
  }

  // Lane and action of the error that `run` raised last.
  std::pair<int, int> failed() const { return {failed_lane_, failed_action_}; }

 private:
  Argument argument_of(const py::tuple& given, const c10::TypePtr& type) {
    const auto kind = given[0].cast<std::string>();
    Argument argument;
    if (kind == "c") {
      argument.constant = is_tensor(type) && PyNumber_Check(given[1].ptr()) && !THPVariable_Check(given[1].ptr())
                              ? wrapped(torch::jit::toIValue(given[1], c10::NumberType::get()))
                              : torch::jit::toIValue(given[1], type);
    } else if (kind == "s") {
      argument.kind = Argument::Kind::slot;
      argument.index = given[1].cast<int>();
    } else if (kind == "n") {
      argument.kind = Argument::Kind::number;
      argument.index = given[1].cast<int>();
      argument.as_float = unwrapped(type)->kind() == c10::TypeKind::FloatType;
      argument.as_tensor = is_tensor(type);
    } else {
      argument.kind = Argument::Kind::list;
      const auto element = unwrapped(type)->expectRef<c10::ListType>().getElementType();
      argument.constant = c10::impl::GenericList(element);
      for (const auto& each : given[1].cast<py::list>())
        argument.elements.push_back(argument_of(each.cast<py::tuple>(), element));
    }
    return argument;
  }

  static bool is_tensor(const c10::TypePtr& type) { return unwrapped(type)->kind() == c10::TypeKind::TensorType; }

  // A Python number beside a tensor does not take part in type promotion as a tensor would.
  static IValue wrapped(const IValue& number) { return at::native::wrapped_scalar_tensor(number.toScalar()); }

  static c10::TypePtr unwrapped(const c10::TypePtr& type) {
    return type->kind() == c10::TypeKind::OptionalType ? type->expectRef<c10::OptionalType>().getElementType() : type;
  }

  IValue value_of(const Argument& argument) const {
    switch (argument.kind) {
      case Argument::Kind::constant:
        return argument.constant;
      case Argument::Kind::slot:
        return slots_[argument.index];
      case Argument::Kind::number: {
        const IValue& number = numbers_[argument.index];
        if (argument.as_float && number.isInt()) return static_cast<double>(number.toInt());
        if (argument.as_tensor) return wrapped(number);
        return number;
      }
      case Argument::Kind::list: {
        auto list = argument.constant.toList().copy();
        list.reserve(argument.elements.size());
        for (const auto& element : argument.elements) list.push_back(value_of(element));
        return list;
      }
    }
    return {};
  }

  void step() {
    failed_lane_ = failed_action_ = -1;
    for (size_t i = 0; i < users_.size(); ++i) counters_[i].store(users_[i], std::memory_order_relaxed);
    const size_t others = lanes_.size() - (on_caller_ ? 1 : 0);
    finished_.store(0, std::memory_order_relaxed);
    began_ns_ = last_poll_ns_ = now_ns();
    const uint32_t epoch = step_.fetch_add(1, std::memory_order_release) + 1;
    if (others) wake(step_);
    if (on_caller_) run_lane(0, epoch, true);
    for (uint32_t seen; (seen = finished_.load(std::memory_order_acquire)) < others;) {
      for (int spin = 0; spin < kSpins && finished_.load(std::memory_order_acquire) == seen; ++spin) pause_cpu();
      if (finished_.load(std::memory_order_acquire) == seen) sleep_on(finished_, seen, kPollNs);
      poll(now_ns());
    }
    if (failure_) {
      for (auto& slot : slots_) slot = IValue();
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
      Lane& lane = *lanes_[number];
      if (!lane.cpus.empty()) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (int cpu : lane.cpus) CPU_SET(cpu, &set);
        TORCH_CHECK(!pthread_setaffinity_np(pthread_self(), sizeof(set), &set), "lane ", number,
                    " cannot be pinned to its cores");
      }
      // Asking first makes torch initialise this thread; otherwise its first op would undo the setting.
      at::get_num_threads();
      at::set_num_threads(lane.width);
    } catch (...) {
      fail(number, -1);
    }
    ready_.fetch_add(1, std::memory_order_release);
    while (true) {
      for (int spin = 0; spin < kIdleSpins && step_.load(std::memory_order_acquire) == seen; ++spin) pause_cpu();
      while (step_.load(std::memory_order_acquire) == seen) sleep_on(step_, seen, 0);
      seen = step_.load(std::memory_order_acquire);
      if (closing_) return;
      run_lane(number, seen, false);
      finished_.fetch_add(1, std::memory_order_release);
      wake(finished_);
    }
  }

  void run_lane(size_t number, uint32_t epoch, bool polls) {
    Lane& lane = *lanes_[number];
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
    c10::AutoGradMode mode(false);
    std::vector<IValue> stack;
    size_t at = 0;
    try {
      for (; at < lane.actions.size(); ++at) {
        Action& action = lane.actions[at];
        for (int word : action.waits) wait(words_[word], epoch, polls);
        if (abort_.load(std::memory_order_relaxed)) return;
        if (c10::GradMode::is_enabled() != action.grad_mode) c10::GradMode::set_enabled(action.grad_mode);
        const int64_t start = now_ns();
        lane.times[2 * at] = start;
        for (const Call& call : action.calls) invoke(call, stack);
        for (int slot : action.frees) slots_[slot] = IValue();
        const int64_t end = now_ns();
        lane.times[2 * at + 1] = end;
        if (action.word >= 0) {
          words_[action.word].store(epoch, std::memory_order_release);
          wake(words_[action.word]);
        }
        for (auto [counter, slot] : action.shared) {
          if (counters_[counter].fetch_sub(1, std::memory_order_acq_rel) == 1) slots_[slot] = IValue();
        }
        if (polls) poll(end);
      }
    } catch (...) {
      fail(number, at);
    }
  }

  void invoke(const Call& call, std::vector<IValue>& stack) {
    stack.clear();
    for (const auto& argument : call.arguments) stack.push_back(value_of(argument));
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

  void wait(Word& word, uint32_t epoch, bool polls) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (word.load(std::memory_order_acquire) == epoch) return;
      pause_cpu();
    }
    for (uint32_t seen; (seen = word.load(std::memory_order_acquire)) != epoch;) {
      if (abort_) return;
      sleep_on(word, seen, polls ? kPollNs : 0);
      if (polls) poll(now_ns());
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
      try {
        throw error;
      } catch (...) {
        fail(0, -1);
      }
    }
  }

  void fail(size_t lane, int64_t action) {
    if (!abort_.exchange(true)) {
      failure_ = std::current_exception();
      failed_lane_ = static_cast<int>(lane);
      failed_action_ = static_cast<int>(action);
      // Everybody who waits must look again.
      for (auto& word : words_) {
        word.store(step_.load(), std::memory_order_release);
        wake(word);
      }
    }
  }

  std::vector<IValue> slots_;
  std::vector<IValue> numbers_;
  std::vector<Word> words_;
  std::vector<std::atomic<int>> counters_;
  std::vector<int> users_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  Word step_{0};
  Word finished_{0};
  std::atomic<size_t> ready_{0};
  std::atomic<bool> abort_{false};
  std::atomic<bool> closing_{false};
  std::exception_ptr failure_;
  bool on_caller_ = true;
  int failed_lane_ = -1;
  int failed_action_ = -1;
  int64_t began_ns_ = 0;
  int64_t last_poll_ns_ = 0;
};

// glibc gives large blocks back to the system at each free, and faults every page in again at the next step.
bool keep_memory() {
  return mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Core, std::shared_ptr<Core>>(module, "Core")
      .def(py::init<int, int, std::vector<int>>())
      .def("add_lane", &Core::add_lane)
      .def("add_action", &Core::add_action)
      .def("add_call", torch::wrap_pybind_function(&Core::add_call))
      .def("start", torch::wrap_pybind_function(&Core::start))
      .def("close", &Core::close)
      .def("run", torch::wrap_pybind_function(&Core::run))
      .def("times", &Core::times)
      .def("failed", &Core::failed);
  module.def("keep_memory", &keep_memory);
}
