// Guarded places: one struct for each kind of object that a step can read, with the comparison against its old state.

#pragma once

#include "objects.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace hocket::guarded {

namespace py = pybind11;

// Ways to compare a value: the same object; equal and of one type; a number of one type; a tensor of one kind; a tuple,
// list or dict of such tensors and of equal values; no value; such a tree with numbers of one type.
enum Kind : int { kIdentity = 0, kEqual, kNumber, kTensor, kTree, kAbsent, kTreeOfNumbers };

constexpr size_t kAhead = 16;

// Hooks of a tensor: their dict and its version tag. An empty dict counts as none.
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
  std::vector<Meta> meta;   // of a tensor of which only the kind is guarded
  std::vector<Value> parts;  // of a tree
  std::vector<py::object> keys;  // of a tree that is a dict: a copy, since the dict may be written later

  Value(py::object value, int how) : then(std::move(value)), kind(static_cast<Kind>(how)) {
    if (is_tree() && THPVariable_Check(then.ptr())) kind = kTensor;
    if (kind == kTensor) {
      meta.emplace_back(THPVariable_Unpack(then.ptr()));
    } else if (is_tree()) {
      if (PyDict_Check(then.ptr())) {
        for (const auto& item : py::reinterpret_borrow<py::dict>(then)) {
          keys.emplace_back(py::reinterpret_borrow<py::object>(item.first));
          parts.emplace_back(py::reinterpret_borrow<py::object>(item.second), kind);
        }
      } else if ((PyTuple_Check(then.ptr()) && !is_named("torch.Size")) || PyList_Check(then.ptr())) {
        for (const auto& item : then) parts.emplace_back(py::reinterpret_borrow<py::object>(item), kind);
      } else {
        kind = kind == kTreeOfNumbers && is_number() ? kNumber : kEqual;
      }
    }
  }
  bool is_tree() const { return kind == kTree || kind == kTreeOfNumbers; }
  bool is_named(const char* name) const { return std::strcmp(Py_TYPE(then.ptr())->tp_name, name) == 0; }
  bool is_number() const {
    return PyLong_CheckExact(then.ptr()) || PyFloat_CheckExact(then.ptr()) || is_named("numpy.float64");
  }
  bool holds(PyObject* now) const {
    if (now == nullptr) return kind == kAbsent;
    if (now == then.ptr() && kind != kTensor && !is_tree()) return true;
    switch (kind) {
      case kIdentity: return false;
      case kEqual: return equal(now, then.ptr());
      case kNumber: return Py_TYPE(now) == Py_TYPE(then.ptr());
      case kTensor: return THPVariable_Check(now) && meta[0].holds(THPVariable_Unpack(now));
      case kTree:
      case kTreeOfNumbers: return tree_holds(now);
      case kAbsent: return false;
    }
    return false;
  }
  bool tree_holds(PyObject* now) const {
    if (Py_TYPE(now) != Py_TYPE(then.ptr())) return false;
    if (PyDict_Check(now)) {
      if (static_cast<size_t>(PyDict_GET_SIZE(now)) != parts.size()) return false;
      PyObject *key, *item;
      Py_ssize_t at = 0;
      for (size_t i = 0; PyDict_Next(now, &at, &key, &item); i++)
        if (!equal(key, keys[i].ptr()) || !parts[i].holds(item)) return false;
      return true;
    }
    if (static_cast<size_t>(PySequence_Fast_GET_SIZE(now)) != parts.size()) return false;
    for (size_t i = 0; i < parts.size(); i++)
      if (!parts[i].holds(PySequence_Fast_GET_ITEM(now, static_cast<Py_ssize_t>(i)))) return false;
    return true;
  }
};

inline std::vector<Value> values_of(const py::list& values, const std::vector<int>& kinds) {
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
  bool whole;    // keys and their order are compared, too
  bool ordered;  // an OrderedDict: moving a key to its end changes no tag
  int group;

  bool order_holds() const {
    PyObject* iterator = (ordered ? PyODict_Type : PyDict_Type).tp_iter(dict.ptr());
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
  bool trees_hold() const {
    for (size_t i = 0; i < keys.size(); i++)
      if (values[i].is_tree() && !values[i].holds(PyDict_GetItem(dict.ptr(), keys[i].ptr()))) return false;
    return true;
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
    PyObject* now = PyObject_GenericGetAttr(owner.ptr(), name.ptr());  // runs no code of the user's class
    if (now == nullptr) PyErr_Clear();
    const bool same = value.holds(now);
    Py_XDECREF(now);
    return same;
  }
};

// The class of an object, and the bases of a class.
struct Typed {
  PyObject* object;
  PyTypeObject* type;
  PyObject* bases;
  int group;

  static PyObject* bases_of(PyObject* object) {
    return PyType_Check(object) ? reinterpret_cast<PyTypeObject*>(object)->tp_mro : nullptr;
  }
  bool holds() const { return Py_TYPE(object) == type && (bases == nullptr || bases_of(object) == bases); }
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

// Plain members only: looking up an object of the user's class could run user code.
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

}  // namespace hocket::guarded
