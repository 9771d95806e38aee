// Guards: the Python state that a captured step reads must be as it was at the capture.
//
// The table is checked before every planned step, so its common case has to cost nanoseconds. CPython (before 3.13)
// gives each dict a version tag that every write changes: while the tag is the same, no value of the dict is read. When
// it has changed, the values are compared, and if they are equal, the new tag is the expected one: a write of the same
// value, or of a value without a guard, costs one comparison.
//
//   dicts (instances, modules, globals, classes)   tag, else size and values
//   cells, lists, slots, functions                 values
//   classes of objects, bases of classes           addresses
//   tensors                                        dtype, device, sizes, strides, requires_grad, hooks
//   buffers (small numpy arrays, bytearrays)       bytes
//   tests                                          a Python callable that returns a bool
//
// The table holds references to all expected objects, so an equal address is the same object.

#include "bindings.h"
#include "guarded.h"

#include <string>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;
using hocket::kTags;
using hocket::Meta;
using hocket::tag_of;
using namespace hocket::guarded;

class Table : public hocket::Condition {
 public:
  int add_dict(py::object dict, const py::list& keys, const py::list& values, const std::vector<int>& kinds, bool whole,
               bool ordered) {
    Dict made{dict, {}, values_of(values, kinds), PyDict_GET_SIZE(dict.ptr()), whole, ordered, groups_};
    for (const auto& key : keys) made.keys.push_back(py::reinterpret_borrow<py::object>(key));
    tagged_.push_back({dict.ptr(), 0});  // no dict's tag: the step may have written since the values were read
    for (const auto& value : made.values)
      if (value.is_tree()) {  // may be written in place, which does not change the tag of this dict
        trees_.push_back(dicts_.size());
        break;
      }
    if (ordered && made.keys.size() > 1) ordered_.push_back(dicts_.size());
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
  int add_type(py::object object) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    PyObject* bases = Typed::bases_of(object.ptr());
    typed_.push_back({object.ptr(), Py_TYPE(object.ptr()), bases, groups_});
    for (PyObject* each : {object.ptr(), type, bases})
      if (each != nullptr) types_.push_back(py::reinterpret_borrow<py::object>(each));
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

  // The number of the first group with a difference; -1 if there is none.
  int check() {
    const size_t num_dicts = tagged_.size();
    for (size_t i = 0; i < num_dicts; i++) {
      // After a step, hardly any of this is in the caches.
      if (i + kAhead < num_dicts) __builtin_prefetch(&reinterpret_cast<PyDictObject*>(tagged_[i + kAhead].dict)->ma_used);
      auto& seen = tagged_[i];
      if (kTags && tag_of(seen.dict) == seen.tag) continue;
      if (!dicts_[i].holds()) return dicts_[i].group;
      seen.tag = tag_of(seen.dict);
    }
    const size_t num_typed = typed_.size();
    for (size_t i = 0; i < num_typed; i++) {
      if (i + kAhead < num_typed) __builtin_prefetch(typed_[i + kAhead].object);
      if (!typed_[i].holds()) return typed_[i].group;
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
    for (const size_t i : trees_)
      if (!dicts_[i].trees_hold()) return dicts_[i].group;
    return -1;
  }
  bool holds(PyObject*) override { return check() == -1; }

  // Expect the present values of a dict from now on.
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
  std::vector<Tagged> tagged_;  // parallel to dicts_: the data of the common case is contiguous
  std::vector<Dict> dicts_;
  std::vector<py::object> types_;  // and objects, to keep them alive
  std::vector<Typed> typed_;
  std::vector<Cell> cells_;
  std::vector<List> lists_;
  std::vector<Slot> slots_;
  std::vector<Function> functions_;
  std::vector<Tensor> tensors_;
  std::vector<Set> sets_;
  std::vector<Buffer> buffers_;
  std::vector<Test> tests_;
  std::vector<size_t> ordered_;
  std::vector<size_t> trees_;  // dicts that hold any
};

}  // namespace

namespace hocket {

void bind_guards(py::module& module) {
  py::class_<Table, Condition>(module, "GuardTable")
      .def(py::init<>())
      .def("add_dict", &Table::add_dict)
      .def("add_class", &Table::add_class)
      .def("add_cell", &Table::add_cell)
      .def("add_list", &Table::add_list)
      .def("add_slot", &Table::add_slot)
      .def("add_type", &Table::add_type)
      .def("add_function", &Table::add_function)
      .def("add_tensor", &Table::add_tensor)
      .def("add_buffer", &Table::add_buffer)
      .def("add_set", &Table::add_set)
      .def("add_test", &Table::add_test)
      .def("check", &Table::check)
      .def("accept", &Table::accept)
      .def("__len__", &Table::size);
}

}  // namespace hocket
