// Signatures: compare a call's signature with that of an earlier call.
//
// `hocket.tracing.signature.signature_of` describes a call in Python objects, which takes some tens of microseconds. This
// is made once for a signature and compares later calls in one pass: the leaves of the batch, the modes of the modules,
// the parameters that require a gradient and have one, and torch's modes. True means that the signature is the same.
// False means that the description in Python has to decide.

#include "bindings.h"
#include "declared.h"
#include "objects.h"
#include "shared_memory.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <array>
#include <optional>
#include <vector>

namespace {

namespace py = pybind11;

// Torch's switches that change which kernels run, in which order they add, or which Python code sees the ops: those of
// `hocket.tracing.switches`, and those of the thread.
struct Switches {
  std::array<uint64_t, 14> words;

  static Switches now() {
    const auto& context = at::globalContext();
    uint64_t flags = 0;
    for (const bool flag :
         {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(),
          context.deterministicFillUninitializedMemory(), context.userEnabledMkldnn(), context.userEnabledNNPACK(),
          context.userEnabledCuDNN(), context.deterministicCuDNN(), context.benchmarkCuDNN(),
          context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
          context.userEnabledCuDNNSDP(), context.allowFP16AccumulationCuBLAS(),
          c10::InferenceMode::is_enabled(), torch::autograd::AnomalyMode::is_enabled(), c10::GradMode::is_enabled(),
          at::autocast::is_autocast_enabled(at::kCPU), at::autocast::is_autocast_enabled(at::kCUDA),
          at::autocast::is_autocast_cache_enabled(), at::SavedTensorDefaultHooks::is_enabled(),
          c10::AutogradState::get_tls_state().get_multithreading_enabled()})
      flags = flags << 1 | static_cast<uint64_t>(flag);
    const auto keys = c10::impl::tls_local_dispatch_key_set();  // transforms of torch.func are among them
    const auto word = [](auto value) { return static_cast<uint64_t>(value); };
    return {{flags, word(at::impl::PythonTorchFunctionTLS::stack_len()), word(c10::impl::TorchDispatchModeTLS::stack_len()),
             word(at::autocast::get_autocast_dtype(at::kCPU)), word(at::autocast::get_autocast_dtype(at::kCUDA)),
             word(c10::get_default_dtype_as_scalartype()), precisions(context),
             word(context.allowFP16ReductionCuBLAS()) << 8 | word(context.allowBF16ReductionCuBLAS()),
             word(at::get_num_threads()), word(at::SavedTensorDefaultHooks::get_tls_state().stack.size()),
             word(context.qEngine()), keys.included_.raw_repr(), keys.excluded_.raw_repr(), denormals()}};
  }
  // The precisions of float32 that kernels read. Torch's own `float32MatmulPrecision` raises if they differ.
  static uint64_t precisions(const at::Context& context) {
    uint64_t found = 0;
    for (const auto backend : {at::Float32Backend::MKLDNN, at::Float32Backend::CUDA})
      for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV, at::Float32Op::RNN})
        found = found << 8 | static_cast<uint64_t>(context.float32Precision(backend, op));
    return found;
  }
  // True if this thread flushes denormal numbers to zero.
  static uint64_t denormals() {
#if defined(__SSE3__) || defined(__x86_64__)
    return _mm_getcsr() & 0x8040;
#else
    return 0;
#endif
  }
  bool operator==(const Switches&) const = default;
};

// The modes that see torch's functions (a default device is one), which `Switches` only counts.
std::vector<py::object> function_modes() {
  std::vector<py::object> found;
  for (int64_t i = 0; i < at::impl::PythonTorchFunctionTLS::stack_len(); i++)
    found.push_back(py::reinterpret_borrow<py::object>(
        at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter())));
  return found;
}

bool are_function_modes(const std::vector<py::object>& modes) {  // as many as there are
  for (size_t i = 0; i < modes.size(); i++)
    if (at::impl::PythonTorchFunctionTLS::get_stack_at(static_cast<int64_t>(i))->ptr(getPyInterpreter()) != modes[i].ptr())
      return false;
  return true;
}

// The extras of a tensor of the batch: Python attributes, a gradient, a graph of autograd.
class Held {
 public:
  explicit Held(PyObject* tensor) : gradients_(gradients_of(tensor)) {
    PyObject *key, *value, *attributes = attributes_of(tensor);
    for (Py_ssize_t at = 0; attributes != nullptr && PyDict_Next(attributes, &at, &key, &value);) {
      if (!PyUnicode_CheckExact(key) || !is_simple(value)) throw py::type_error("expected plain attributes");
      attributes_.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
    }
  }

  bool holds(PyObject* tensor) const {
    PyObject *key, *value, *attributes = attributes_of(tensor);
    if (static_cast<size_t>(attributes ? PyDict_GET_SIZE(attributes) : 0) != attributes_.size()) return false;
    size_t number = 0;
    for (Py_ssize_t at = 0; attributes != nullptr && PyDict_Next(attributes, &at, &key, &value); number++)
      if (!hocket::equal(key, attributes_[number].first.ptr()) || !hocket::equal(value, attributes_[number].second.ptr()))
        return false;
    return gradients_of(tensor) == gradients_;
  }

 private:
  static PyObject* attributes_of(PyObject* tensor) {
    PyObject** found = _PyObject_GetDictPtr(tensor);
    return found == nullptr ? nullptr : *found;
  }
  static bool is_simple(PyObject* value) {
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
        PyUnicode_CheckExact(value);
  }
  static int gradients_of(PyObject* tensor) {
    const auto& variable = THPVariable_Unpack(tensor);
    const auto* impl = variable.unsafeGetTensorImpl();
    const bool has_graph = impl->requires_grad() && variable.grad_fn() != nullptr;
    return 2 * has_graph + impl->grad().defined();
  }

  std::vector<std::pair<py::object, py::object>> attributes_;
  int gradients_;
};

class Signature : public hocket::Places, public hocket::Condition {
 public:
  // If `free[i]`, only the type of leaf `i` is compared, not its value. If `looks`, extras of tensors are compared.
  Signature(const py::object& batch, const std::vector<bool>& free, bool looks)
      : pattern_(batch.ptr()), switches_(Switches::now()), modes_(function_modes()) {
    if (!pattern_.read(batch.ptr(), now_) || free.size() != now_.size()) throw py::value_error("not this batch");
    seen_.start(now_.size());
    for (size_t i = 0; i < now_.size(); i++) {
      Leaf leaf;
      if (THPVariable_Check(now_[i])) {
        leaf.meta.emplace(THPVariable_Unpack(now_[i]));
        if (looks) leaf.held.emplace(now_[i]);
        leaf.first = seen_.add(now_[i], static_cast<int>(i));
      } else if (!free[i]) {
        leaf.value = py::reinterpret_borrow<py::object>(now_[i]);
      }
      leaves_.push_back(std::move(leaf));
    }
  }

  py::list leaves() const {
    py::list found;
    for (PyObject* leaf : now_) found.append(py::reinterpret_borrow<py::object>(leaf));
    return found;
  }

  // The value at a place is compared.
  void expect(int place) { expected_.push_back({place, py::reinterpret_borrow<py::object>(at(place))}); }

  // A parameter is compared by whether it requires a gradient, and whether it has one.
  void expect_parameter(int place) {
    if (!THPVariable_Check(at(place))) throw py::type_error("expected a tensor");
    parameters_.push_back({place, state_of(at(place))});
  }

  bool holds(PyObject* batch) override {
    if (!pattern_.read(batch, now_)) return false;
    for (size_t i = 0; i < now_.size(); i++) {
      const auto& leaf = leaves_[i];
      if (leaf.meta ? !leaf.meta->holds(THPVariable_Unpack(now_[i])) || (leaf.held && !leaf.held->holds(now_[i]))
                    : leaf.value && !hocket::equal(now_[i], leaf.value.ptr()))
        return false;
    }
    if (!places_hold() || !(Switches::now() == switches_) || !are_function_modes(modes_) || !read()) return false;
    for (const auto& [place, value] : expected_)
      if (at(place) != value.ptr() && !hocket::equal(at(place), value.ptr())) return false;
    for (const auto& [place, state] : parameters_)
      if (state_of(at(place)) != state) return false;
    return true;
  }

 private:
  struct Leaf {
    std::optional<hocket::Meta> meta;  // of a tensor
    std::optional<Held> held;
    py::object value;                  // of other leaves; empty if it is not compared
    int first = 0;                     // the first place of this tensor
  };

  static int state_of(PyObject* parameter) {
    const auto* impl = THPVariable_Unpack(parameter).unsafeGetTensorImpl();
    return 2 * impl->requires_grad() + impl->grad().defined();
  }

  // True if each tensor that occurs several times does so at the same places as before.
  bool places_hold() {
    seen_.start(now_.size());
    for (size_t i = 0; i < now_.size(); i++)
      if (leaves_[i].meta && seen_.add(now_[i], static_cast<int>(i)) != leaves_[i].first) return false;
    return true;
  }

  hocket::BatchPattern pattern_;
  Switches switches_;
  std::vector<py::object> modes_;
  std::vector<Leaf> leaves_;
  hocket::AddressTable seen_;
  std::vector<std::pair<int, py::object>> expected_;
  std::vector<std::pair<int, int>> parameters_;
  std::vector<PyObject*> now_;
};

}  // namespace

namespace hocket {

void bind_signature(py::module& module) {
  py::class_<Places>(module, "Places")
      .def("add_object", &Places::add_object)
      .def("add_item", &Places::add_item)
      .def("add_cell", &Places::add_cell)
      .def("at", [](const Places& places, int number) { return py::reinterpret_borrow<py::object>(places.at(number)); });
  py::class_<Signature, Places, Condition>(module, "Signature")
      .def(py::init<const py::object&, const std::vector<bool>&, bool>())
      .def("leaves", &Signature::leaves)
      .def("expect", &Signature::expect)
      .def("expect_parameter", &Signature::expect_parameter)
      .def("holds", [](Signature& signature, const py::object& batch) { return signature.holds(batch.ptr()); });
}

}  // namespace hocket
