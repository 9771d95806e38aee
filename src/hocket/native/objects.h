// Comparison of Python values, and repeated reads of their places.
//
// A place is an item of a dict, a list or a tuple, or a cell's content; the container may itself stand at another place
// (``vars(optimizer)["state"][parameter]["exp_avg"]``). CPython (before 3.13) gives each dict a version tag that every
// write changes: while the tag stands, what was read last time is still there and nothing is looked up.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <utility>
#include <vector>

namespace hocket {

namespace py = pybind11;

constexpr bool kTags = PY_VERSION_HEX < 0x030D0000;
constexpr size_t kAhead = 8;  // places that are prefetched

inline uint64_t tag_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  return 0;
#endif
}

// True if two numpy scalars have the same bits. A long double has padding bits, so it is never equal here.
inline bool bits_equal(PyObject* now, PyObject* then, bool& known) {
  Py_buffer a, b;
  known = PyObject_GetBuffer(now, &a, PyBUF_SIMPLE) == 0;
  if (known && PyObject_GetBuffer(then, &b, PyBUF_SIMPLE) != 0) {
    PyBuffer_Release(&a);
    known = false;
  }
  if (!known) {
    PyErr_Clear();
    return false;
  }
  const bool same = a.len == b.len && std::memcmp(a.buf, b.buf, static_cast<size_t>(a.len)) == 0;
  known = same || a.len <= static_cast<Py_ssize_t>(sizeof(double));
  PyBuffer_Release(&a);
  PyBuffer_Release(&b);
  return same;
}

// True for one type and equal values. Numbers are compared by their bits: -0.0 differs from 0.0, NaN equals itself.
inline bool equal(PyObject* now, PyObject* then) {
  if (now == then) return true;
  if (Py_TYPE(now) != Py_TYPE(then)) return false;
  if (PyFloat_Check(now)) {
    const double a = PyFloat_AS_DOUBLE(now), b = PyFloat_AS_DOUBLE(then);
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
  if (PyComplex_Check(now)) {
    const Py_complex a = reinterpret_cast<PyComplexObject*>(now)->cval, b = reinterpret_cast<PyComplexObject*>(then)->cval;
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
  if (PyTuple_CheckExact(now)) {
    if (PyTuple_GET_SIZE(now) != PyTuple_GET_SIZE(then)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(now); i++)
      if (!equal(PyTuple_GET_ITEM(now, i), PyTuple_GET_ITEM(then, i))) return false;
    return true;
  }
  if (!PyUnicode_Check(now) && !PyLong_Check(now) && !PyBytes_Check(now) && PyObject_CheckBuffer(now)) {
    bool known = false;
    const bool same = bits_equal(now, then, known);
    if (known) return same;
  }
  const int same = PyObject_RichCompareBool(now, then, Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

// The kind of a tensor.
struct Meta {
  c10::ScalarType dtype;
  c10::Device device;
  c10::Layout layout;
  bool requires_grad, is_conj, is_neg, is_inference;
  std::vector<int64_t> sizes, strides;

  explicit Meta(const at::Tensor& t)
      : dtype(t.scalar_type()), device(t.device()), layout(t.layout()), requires_grad(t.requires_grad()),
        is_conj(t.is_conj()), is_neg(t.is_neg()), is_inference(t.is_inference()), sizes(t.sizes().vec()) {
    if (layout == c10::kStrided) strides = t.strides().vec();
  }
  bool holds(const at::Tensor& t) const {
    const auto* impl = t.unsafeGetTensorImpl();
    return c10::typeMetaToScalarType(impl->dtype()) == dtype && impl->sizes() == c10::IntArrayRef(sizes) &&
        impl->device() == device && impl->requires_grad() == requires_grad && impl->layout() == layout &&
        t.is_conj() == is_conj && t.is_neg() == is_neg && t.is_inference() == is_inference &&
        (layout != c10::kStrided || impl->strides() == c10::IntArrayRef(strides));
  }
};

class Places {
 public:
  // A fixed object, with the interface of a place.
  int add_object(py::object value) {
    nodes_.push_back({Kind::object, -1, 0, nullptr, Py_TYPE(value.ptr()), 0, nullptr, value.ptr(), nullptr});
    kept_.push_back(std::move(value));
    return static_cast<int>(nodes_.size()) - 1;
  }
  // The item `key` (for lists and tuples a position) of the container at `parent`.
  int add_item(int parent, py::object key) {
    PyObject* container = nodes_.at(static_cast<size_t>(parent)).value;
    Node node{Kind::dict, parent, 0, Py_TYPE(container), nullptr, 0, nullptr, nullptr, key.ptr()};
    if (PyList_CheckExact(container) || PyTuple_CheckExact(container)) {
      node.kind = PyList_CheckExact(container) ? Kind::list : Kind::tuple;
      node.position = key.cast<Py_ssize_t>();
    } else if (!PyDict_Check(container)) {
      throw py::type_error("a place is an item of a dict, a list or a tuple");
    }
    kept_.push_back(std::move(key));
    return add(node);
  }
  int add_cell(py::object cell) {
    const int parent = add_object(std::move(cell));
    PyObject* container = nodes_[static_cast<size_t>(parent)].value;
    if (!PyCell_Check(container)) throw py::type_error("expected a cell");
    return add({Kind::cell, parent, 0, Py_TYPE(container), nullptr, 0, nullptr, nullptr, nullptr});
  }
  // The value at the last `read`.
  PyObject* at(int number) const { return nodes_[static_cast<size_t>(number)].value; }

  // Read all places; false if one is gone or has a value of another type. Values are valid until Python code runs.
  bool read() {
    // Looking up a key of a user's class may run user code: then read again, when all versions are known.
    bool ran_code = false;
    for (size_t i = 0; i < nodes_.size(); i++) {
      // After a step, hardly any of this is in the caches.
      if (i + kAhead < nodes_.size()) __builtin_prefetch(nodes_[i + kAhead].container);
      if (!look(nodes_[i], ran_code)) return false;
    }
    if (!ran_code) return true;
    for (auto& node : nodes_)
      if (!look(node, ran_code)) return false;
    return true;
  }

 private:
  enum class Kind : uint8_t { object, dict, list, tuple, cell };

  struct Node {
    Kind kind;
    int parent;
    Py_ssize_t position;
    PyTypeObject* container_type;
    PyTypeObject* type;  // of the value
    uint64_t tag;
    PyObject* container;
    PyObject* value;  // borrowed
    PyObject* key;
  };

  int add(Node node) {
    bool ran_code = false;
    if (!look(node, ran_code)) throw py::key_error("nothing stands there");
    nodes_.push_back(node);
    return static_cast<int>(nodes_.size()) - 1;
  }

  bool look(Node& node, bool& ran_code) {
    if (node.kind == Kind::object) return true;
    PyObject* container = nodes_[static_cast<size_t>(node.parent)].value;
    PyObject* value = nullptr;
    if (node.kind == Kind::dict) {
      if (kTags && container == node.container && tag_of(container) == node.tag) return true;
      if (Py_TYPE(container) != node.container_type) return false;
      value = PyDict_GetItemWithError(container, node.key);
      if (value == nullptr) {
        PyErr_Clear();
        return false;
      }
      ran_code = ran_code || !PyUnicode_CheckExact(node.key);
    } else {
      if (Py_TYPE(container) != node.container_type) return false;
      if (node.kind == Kind::cell) {
        value = PyCell_GET(container);
      } else if (node.position < Py_SIZE(container)) {
        value = node.kind == Kind::list ? PyList_GET_ITEM(container, node.position)
                                        : PyTuple_GET_ITEM(container, node.position);
      }
      if (value == nullptr) return false;
    }
    if (node.type == nullptr) node.type = Py_TYPE(value);
    if (Py_TYPE(value) != node.type) {
      node.container = nullptr;  // the tag covers only a value of this type
      return false;
    }
    node.value = value;
    if (node.kind == Kind::dict) {
      node.container = container;
      node.tag = tag_of(container);
    }
    return true;
  }

  std::vector<Node> nodes_;
  std::vector<py::object> kept_;
};

// The leaves of a batch of lists, tuples and dicts, in the order of torch's pytree.
class BatchPattern {
 public:
  explicit BatchPattern(PyObject* batch) { add(batch); }

  // False if the batch has another structure, or a leaf another type.
  bool read(PyObject* batch, std::vector<PyObject*>& leaves) const {
    leaves.clear();
    size_t part = 0;
    return read(batch, part, leaves);
  }

 private:
  struct Part {
    py::object type;
    Py_ssize_t size = -1;  // of a leaf
    bool is_dict = false;
    std::vector<py::object> keys;
  };

  void add(PyObject* value) {
    Part part{py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(value))), -1, false, {}};
    std::vector<PyObject*> items;
    if (PyDict_CheckExact(value)) {
      part.is_dict = true;
      PyObject *key, *item;
      for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item);) {
        // Comparing keys of other types could run user code.
        if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) throw py::type_error("expected plain keys");
        part.keys.push_back(py::reinterpret_borrow<py::object>(key));
        items.push_back(item);
      }
      part.size = static_cast<Py_ssize_t>(items.size());
    } else if (PyList_CheckExact(value) || PyTuple_CheckExact(value) ||
               (PyTuple_Check(value) && PyObject_HasAttrString(value, "_fields"))) {
      part.size = PySequence_Fast_GET_SIZE(value);
      for (Py_ssize_t i = 0; i < part.size; i++) items.push_back(PySequence_Fast_GET_ITEM(value, i));
    }
    parts_.push_back(std::move(part));
    for (PyObject* item : items) add(item);
  }

  bool read(PyObject* value, size_t& at, std::vector<PyObject*>& leaves) const {
    const Part& part = parts_[at++];
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != part.type.ptr()) return false;
    if (part.size < 0) {
      leaves.push_back(value);
      return true;
    }
    if (part.is_dict) {
      if (PyDict_GET_SIZE(value) != part.size) return false;
      PyObject *key, *item;
      size_t number = 0;
      for (Py_ssize_t next = 0; PyDict_Next(value, &next, &key, &item); number++)
        if (!equal(key, part.keys[number].ptr()) || !read(item, at, leaves)) return false;
      return true;
    }
    if (PySequence_Fast_GET_SIZE(value) != part.size) return false;
    for (Py_ssize_t i = 0; i < part.size; i++)
      if (!read(PySequence_Fast_GET_ITEM(value, i), at, leaves)) return false;
    return true;
  }

  std::vector<Part> parts_;
};

}  // namespace hocket
