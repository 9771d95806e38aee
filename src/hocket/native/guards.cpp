// Guards: does the Python state that a captured step reads still hold what it held at the capture?
//
// The table is checked before every planned step, so its common case has to cost nanoseconds. CPython (before 3.13)
// gives each dict a version tag that every write changes: while the tag stands, no value of the dict is looked at. When
// it has moved, the values are compared, and if they hold the new tag is the one to expect: a write of the same value,
// or of a value that no guard is about, costs one comparison and no more.
//
//   dicts (instances, modules, globals, classes)   tag, else size and values
//   cells, lists, slots, functions                 values
//   tensors                                        dtype, device, sizes, strides, requires_grad, hooks
//   buffers (small numpy arrays, bytearrays)       bytes
//   tests                                          a Python callable that says whether it holds
//
// The table holds references to all that it compares with, so an address that is met again is the same object.

#include "bindings.h"
#include "objects.h"

#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <string>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;
using hocket::equal;
using hocket::kTags;
using hocket::Meta;
using hocket::tag_of;

// How a value is compared: the same object; equal and of one type; a number of one type; a tensor of one kind.
enum Kind : int { kIdentity = 0, kEqual = 1, kNumber = 2, kTensor = 3 };

constexpr size_t kAhead = 16;

// Hooks of a tensor: the dict that holds them and its tag; a dict without hooks is as good as none.
struct Hooks {
  PyObject* dict = nullptr;
  uint64_t tag = 0;
  Py_ssize_t size = 0;

  explicit Hooks(PyObject* found) {
    if (found == nullptr || found == Py_None || !PyDict_Check(found) || PyDict_GET_SIZE(found) == 0) return;
    dict = found;
    tag = tag_of(found);
    size = PyDict_GET_SIZE(found);
  }
  bool operator==(const Hooks& other) const { return dict == other.dict && tag == other.tag && size == other.size; }
};

struct Value {
  py::object then;
  Kind kind;
  std::vector<Meta> meta;  // of a tensor of which only the kind is guarded

  Value(py::object value, int how) : then(std::move(value)), kind(static_cast<Kind>(how)) {
    if (kind == kTensor) meta.emplace_back(THPVariable_Unpack(then.ptr()));
  }
  bool holds(PyObject* now) const {
    if (now == nullptr) return false;
    if (now == then.ptr() && kind != kTensor) return true;
    switch (kind) {
      case kIdentity: return false;
      case kEqual: return equal(now, then.ptr());
      case kNumber: return Py_TYPE(now) == Py_TYPE(then.ptr());
      case kTensor: return THPVariable_Check(now) && meta[0].holds(THPVariable_Unpack(now));
    }
    return false;
  }
};

std::vector<Value> values_of(const py::list& values, const std::vector<int>& kinds) {
  std::vector<Value> made;
  made.reserve(values.size());
  for (size_t i = 0; i < values.size(); i++) made.emplace_back(py::object(values[i]), kinds.at(i));
  return made;
}

struct Dict {
  py::object dict;
  std::vector<py::object> keys;
  std::vector<Value> values;
  Py_ssize_t size;
  bool whole;    // no key may come, go or change its place
  bool ordered;  // an OrderedDict: moving a key to its end changes no tag
  int group;

  bool order_holds() const {
    PyObject* iterator = PyObject_GetIter(dict.ptr());
    if (iterator == nullptr) {
      PyErr_Clear();
      return false;
    }
    bool same = true;
    for (const auto& key : keys) {
      PyObject* found = PyIter_Next(iterator);
      same = found != nullptr && (found == key.ptr() || equal(found, key.ptr()));
      Py_XDECREF(found);
      if (!same) break;
    }
    Py_DECREF(iterator);
    if (PyErr_Occurred()) PyErr_Clear();
    return same;
  }
  bool holds() const {
    if (PyDict_GET_SIZE(dict.ptr()) != size) return false;
    for (size_t i = 0; i < keys.size(); i++) {
      PyObject* now = PyDict_GetItemWithError(dict.ptr(), keys[i].ptr());
      if (now == nullptr) {
        PyErr_Clear();
        return false;
      }
      if (!values[i].holds(now)) return false;
    }
    return !whole || order_holds();
  }
};

struct Tagged {
  PyObject* dict;
  uint64_t tag;
};

struct Cell {
  py::object cell;
  Value value;
  int group;
};

struct List {
  py::object list;
  std::vector<Value> values;
  int group;

  bool holds() const {
    if (static_cast<size_t>(PyList_GET_SIZE(list.ptr())) != values.size()) return false;
    for (size_t i = 0; i < values.size(); i++)
      if (!values[i].holds(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)))) return false;
    return true;
  }
};

struct Slot {
  py::object owner, name;
  Value value;
  int group;

  bool holds() const {
    PyObject* now = PyObject_GetAttr(owner.ptr(), name.ptr());
    if (now == nullptr) {
      PyErr_Clear();
      return false;
    }
    const bool same = value.holds(now);
    Py_DECREF(now);
    return same;
  }
};

struct Function {
  py::object function, code, defaults, keyword_defaults;
  int group;

  bool holds() const {
    auto* f = reinterpret_cast<PyFunctionObject*>(function.ptr());
    const auto same = [](PyObject* now, const py::object& then) { return (now ? now : Py_None) == then.ptr(); };
    return same(f->func_code, code) && same(f->func_defaults, defaults) &&
        same(f->func_kwdefaults, keyword_defaults);
  }
};

struct Tensor {
  py::object tensor;
  Meta meta;
  Hooks hooks, post_hooks;
  py::object hooks_kept, post_hooks_kept;
  int group;

  bool holds() const {
    auto* variable = reinterpret_cast<THPVariable*>(tensor.ptr());
    return meta.holds(THPVariable_Unpack(tensor.ptr())) && Hooks(variable->backward_hooks) == hooks &&
        Hooks(variable->post_accumulate_grad_hooks) == post_hooks;
  }
};

// Plain members only: a member that is an object of the user's could run his code when it is looked up.
struct Set {
  py::object set;
  std::vector<py::object> members;
  int group;

  bool holds() const {
    if (static_cast<size_t>(PySet_GET_SIZE(set.ptr())) != members.size()) return false;
    for (const auto& member : members) {
      const int found = PySet_Contains(set.ptr(), member.ptr());
      if (found < 0) PyErr_Clear();
      if (found != 1) return false;
    }
    return true;
  }
};

struct Buffer {
  py::object owner;
  std::string bytes;
  int group;

  static bool read(PyObject* owner, std::string* bytes) {
    Py_buffer view;
    if (PyObject_GetBuffer(owner, &view, PyBUF_FULL_RO) != 0) {
      PyErr_Clear();
      return false;
    }
    bytes->resize(static_cast<size_t>(view.len));
    const bool read = PyBuffer_ToContiguous(bytes->data(), &view, view.len, 'C') == 0;
    PyBuffer_Release(&view);
    if (!read) PyErr_Clear();
    return read;
  }
  bool holds() const {
    std::string now;
    return read(owner.ptr(), &now) && now == bytes;
  }
};

struct Test {
  py::object test;
  int group;

  bool holds() const {
    PyObject* answer = PyObject_CallNoArgs(test.ptr());
    if (answer == nullptr) {
      PyErr_Clear();
      return false;
    }
    const bool same = PyObject_IsTrue(answer) == 1;
    Py_DECREF(answer);
    return same;
  }
};

// Torch's switches that change which kernels run, or which Python code sees the ops.
uint64_t torch_flags() {
  const auto& context = at::globalContext();
  uint64_t word = 0;
  for (const bool flag :
       {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(), context.userEnabledMkldnn(),
        context.userEnabledCuDNN(), context.deterministicCuDNN(), context.benchmarkCuDNN(),
        c10::InferenceMode::is_enabled(), torch::autograd::AnomalyMode::is_enabled()})
    word = word << 1 | static_cast<uint64_t>(flag);
  word = word << 8 | static_cast<uint64_t>(at::impl::PythonTorchFunctionTLS::stack_len());
  return word << 8 | static_cast<uint64_t>(c10::impl::TorchDispatchModeTLS::stack_len());
}

class Table {
 public:
  int add_dict(py::object dict, const py::list& keys, const py::list& values, const std::vector<int>& kinds, bool whole,
               bool ordered) {
    Dict made{dict, {}, values_of(values, kinds), PyDict_GET_SIZE(dict.ptr()), whole, ordered, groups_};
    for (const auto& key : keys) made.keys.push_back(py::reinterpret_borrow<py::object>(key));
    tagged_.push_back({dict.ptr(), tag_of(dict.ptr())});
    dicts_.push_back(std::move(made));
    return groups_++;
  }
  // A class keeps its attributes in a dict that Python code sees only through a proxy.
  int add_class(py::object type, const py::list& keys, const py::list& values, const std::vector<int>& kinds) {
    auto* dict = reinterpret_cast<PyTypeObject*>(type.ptr())->tp_dict;
    if (dict == nullptr) throw py::type_error("a static type has no dict of its own");
    types_.push_back(type);
    return add_dict(py::reinterpret_borrow<py::object>(dict), keys, values, kinds, false, false);
  }
  int add_cell(py::object cell, py::object value, int kind) {
    cells_.push_back({cell, Value(value, kind), groups_});
    return groups_++;
  }
  int add_list(py::object list, const py::list& values, const std::vector<int>& kinds) {
    lists_.push_back({list, values_of(values, kinds), groups_});
    return groups_++;
  }
  int add_slot(py::object owner, py::object name, py::object value, int kind) {
    slots_.push_back({owner, name, Value(value, kind), groups_});
    return groups_++;
  }
  int add_function(py::object function) {
    functions_.push_back({function, function.attr("__code__"), function.attr("__defaults__"),
                          function.attr("__kwdefaults__"), groups_});
    return groups_++;
  }
  int add_tensor(py::object tensor) {
    auto* variable = reinterpret_cast<THPVariable*>(tensor.ptr());
    const auto keep = [](PyObject* o) { return o ? py::reinterpret_borrow<py::object>(o) : py::object(py::none()); };
    tensors_.push_back({tensor, Meta(THPVariable_Unpack(tensor.ptr())), Hooks(variable->backward_hooks),
                        Hooks(variable->post_accumulate_grad_hooks), keep(variable->backward_hooks),
                        keep(variable->post_accumulate_grad_hooks), groups_});
    return groups_++;
  }
  int add_buffer(py::object owner) {
    Buffer made{owner, {}, groups_};
    if (!Buffer::read(owner.ptr(), &made.bytes)) throw py::type_error("the object has no readable buffer");
    buffers_.push_back(std::move(made));
    return groups_++;
  }
  int add_set(py::object set) {
    Set made{set, {}, groups_};
    for (const auto& member : set) made.members.push_back(py::reinterpret_borrow<py::object>(member));
    sets_.push_back(std::move(made));
    return groups_++;
  }
  int add_test(py::object test) {
    tests_.push_back({test, groups_});
    return groups_++;
  }
  void guard_flags() { flags_ = torch_flags(), flagged_ = true; }

  // The number of the first group that does not hold; -1 if all do, -2 if torch's own switches were changed.
  int check() {
    if (flagged_ && torch_flags() != flags_) return -2;
    const size_t num_dicts = tagged_.size();
    for (size_t i = 0; i < num_dicts; i++) {
      // After a step hardly any of this lies in the caches.
      if (i + kAhead < num_dicts) __builtin_prefetch(&reinterpret_cast<PyDictObject*>(tagged_[i + kAhead].dict)->ma_used);
      auto& seen = tagged_[i];
      if (kTags && tag_of(seen.dict) == seen.tag) continue;
      if (!dicts_[i].holds()) return dicts_[i].group;
      seen.tag = tag_of(seen.dict);
    }
    for (const auto& cell : cells_)
      if (!cell.value.holds(PyCell_GET(cell.cell.ptr()))) return cell.group;
    if (const int failed = first(lists_); failed >= 0) return failed;
    if (const int failed = first(slots_); failed >= 0) return failed;
    if (const int failed = first(functions_); failed >= 0) return failed;
    if (const int failed = first(tensors_); failed >= 0) return failed;
    if (const int failed = first(sets_); failed >= 0) return failed;
    if (const int failed = first(buffers_); failed >= 0) return failed;
    if (const int failed = first(tests_); failed >= 0) return failed;
    for (const size_t i : ordered_)
      if (!dicts_[i].order_holds()) return dicts_[i].group;
    return -1;
  }
  void finish() {
    for (size_t i = 0; i < dicts_.size(); i++)
      if (dicts_[i].ordered && dicts_[i].keys.size() > 1) ordered_.push_back(i);
  }
  // What a dict holds now is what to expect from now on.
  void accept(int group) {
    for (auto& dict : dicts_) {
      if (dict.group != group) continue;
      dict.size = PyDict_GET_SIZE(dict.dict.ptr());
      for (size_t i = 0; i < dict.keys.size(); i++)
        if (PyObject* now = PyDict_GetItemWithError(dict.dict.ptr(), dict.keys[i].ptr()))
          dict.values[i] = Value(py::reinterpret_borrow<py::object>(now), dict.values[i].kind);
    }
  }
  int size() const { return groups_; }

 private:
  template <class T>
  static int first(const std::vector<T>& all) {
    for (const auto& each : all)
      if (!each.holds()) return each.group;
    return -1;
  }

  int groups_ = 0;
  uint64_t flags_ = 0;
  bool flagged_ = false;
  std::vector<Tagged> tagged_;  // in step with dicts_: what the common case reads lies together
  std::vector<Dict> dicts_;
  std::vector<py::object> types_;
  std::vector<Cell> cells_;
  std::vector<List> lists_;
  std::vector<Slot> slots_;
  std::vector<Function> functions_;
  std::vector<Tensor> tensors_;
  std::vector<Set> sets_;
  std::vector<Buffer> buffers_;
  std::vector<Test> tests_;
  std::vector<size_t> ordered_;
};

}  // namespace

namespace hocket {

void bind_guards(py::module& module) {
  py::class_<Table>(module, "GuardTable")
      .def(py::init<>())
      .def("add_dict", &Table::add_dict)
      .def("add_class", &Table::add_class)
      .def("add_cell", &Table::add_cell)
      .def("add_list", &Table::add_list)
      .def("add_slot", &Table::add_slot)
      .def("add_function", &Table::add_function)
      .def("add_tensor", &Table::add_tensor)
      .def("add_buffer", &Table::add_buffer)
      .def("add_set", &Table::add_set)
      .def("add_test", &Table::add_test)
      .def("guard_flags", &Table::guard_flags)
      .def("finish", &Table::finish)
      .def("check", &Table::check)
      .def("accept", &Table::accept)
      .def("__len__", &Table::size);
}

}  // namespace hocket
