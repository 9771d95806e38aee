// The numbers of a step, computed before it as eager Python computes them: float for float, int for int.
//
// Arithmetic that Python does in one IEEE operation is done here. All else (a power, a rounding, a guard of the user's) is
// computed by the Python function itself, once a step for equal operands: a hundred parameters of Adam have one step
// count. In exceptional cases (an integer that overflows, a division by zero) there is no result here, and the caller
// uses `hocket.tracing.program.compile_tape` instead.

#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace hocket {

namespace py = pybind11;

// numpy's class of float, which computes by functions of its own.
inline PyTypeObject* scalar_class() {
  static PyObject* found = py::object(py::module_::import("numpy").attr("float64")).release().ptr();
  return reinterpret_cast<PyTypeObject*>(found);
}

struct Number {
  enum class Kind : uint8_t { floating, scalar, whole, truth, object } kind = Kind::whole;
  union {
    double floating;  // of a scalar, too
    int64_t whole;
    PyObject* object;  // kept by the tape
  };

  explicit Number(double value) : kind(Kind::floating), floating(value) {}
  explicit Number(int64_t value) : whole(value) {}
  explicit Number(bool value) : kind(Kind::truth), whole(value) {}

  // None for an int that is too large, and for all other types.
  static std::optional<Number> of(PyObject* value) {
    if (PyFloat_CheckExact(value)) return Number(PyFloat_AS_DOUBLE(value));
    if (Py_TYPE(value) == scalar_class()) {
      Number found(PyFloat_AS_DOUBLE(value));
      found.kind = Kind::scalar;
      return found;
    }
    if (!PyLong_CheckExact(value)) return {};
    int overflow = 0;
    const int64_t whole = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) return {};
    return Number(whole);
  }
  // The value of a leaf of the batch, which may be text. The caller holds it.
  static std::optional<Number> of_leaf(PyObject* value) {
    if (!PyUnicode_CheckExact(value)) return of(value);
    Number found(int64_t{0});
    found.kind = Kind::object;
    found.object = value;
    return found;
  }
  py::object boxed() const {
    switch (kind) {
      case Kind::floating: return py::float_(floating);
      case Kind::scalar: return py::handle(reinterpret_cast<PyObject*>(scalar_class()))(floating);
      case Kind::whole: return py::int_(whole);
      case Kind::truth: return py::bool_(whole != 0);
      case Kind::object: break;
    }
    return py::reinterpret_borrow<py::object>(object);
  }
  // A float, or an int that is one without rounding.
  std::optional<double> as_double() const {
    constexpr int64_t kExact = int64_t{1} << 53;
    if (kind == Kind::floating) return floating;
    if (kind == Kind::whole && -kExact <= whole && whole <= kExact) return static_cast<double>(whole);
    return {};
  }
  bool same(const Number& other) const {
    return kind == other.kind && kind != Kind::object && std::memcmp(&whole, &other.whole, sizeof whole) == 0;
  }
};

class Tape {
 public:
  // `found`: its value at the recording; later steps have a value of the same type.
  void add_leaf(int leaf, const Number& found) {
    if (found.kind == Number::Kind::object) kept_.push_back(found.boxed());
    entries_.push_back({'x', nullptr, {{true, leaf}}});
    found_.push_back(found);
  }
  // These leaves must have the value that they were recorded with.
  void expect(std::vector<size_t> leaves) { unproven_ = std::move(leaves); }

  // `sign`: + - * /, or a space for any other function. An operand is ("n", entry) or ("c", value).
  void add_entry(char sign, py::object function, const std::vector<std::pair<std::string, py::object>>& operands) {
    Entry entry{sign, function.ptr(), {}};
    kept_.push_back(std::move(function));
    for (const auto& [kind, value] : operands) {
      if (kind == "n") {
        entry.operands.push_back({true, value.cast<int>()});
        continue;
      }
      auto number = Number::of(value.ptr());
      if (!number) {
        number.emplace(int64_t{0});
        number->kind = Number::Kind::object;
        number->object = value.ptr();
        kept_.push_back(value);
      }
      entry.operands.push_back({false, static_cast<int>(constants_.size())});
      constants_.push_back(*number);
    }
    if (entry.sign != ' ' && entry.operands.size() != 2) entry.sign = ' ';
    entries_.push_back(std::move(entry));
  }

  void add_guard(int entry, py::object outcome) { guards_.emplace_back(entry, std::move(outcome)); }

  // Compute all entries from these leaves; false if that is impossible here, or a guard fails.
  bool evaluate(const std::vector<Number>& leaves) {
    for (size_t i = 0; i < leaves.size(); i++)
      if (leaves[i].kind != found_[i].kind) return false;
    for (const size_t i : unproven_)
      if (!leaves[i].same(found_[i])) return false;
    if (!stand_for_one_another(leaves)) divide(leaves);
    made_.clear();
    for (const size_t i : distinct_) {
      const auto& entry = entries_[i];
      if (entry.sign == 'x') {
        values_[i] = leaves[static_cast<size_t>(entry.operands[0].index)];
      } else {
        const auto found = entry.sign == ' ' ? ask(entry) : computed(entry);
        if (!found) return false;
        values_[i] = *found;
      }
    }
    for (const auto& [entry, outcome] : guards_)
      if (!is(value(static_cast<size_t>(entry)), outcome.ptr())) return false;
    return true;
  }

  size_t size() const { return entries_.size(); }
  const Number& value(size_t entry) const { return values_[same_as_[entry]]; }
  // The entries that have to be computed, in order, and for each entry the one of them that it equals.
  const std::vector<size_t>& distinct() const { return distinct_; }
  const std::vector<uint32_t>& same_as() const { return same_as_; }

 private:
  struct Operand {
    bool is_entry;
    int index;
  };
  struct Entry {
    char sign;
    PyObject* function;
    std::vector<Operand> operands;
  };

  const Number& value_of(const Operand& operand) const {
    const auto index = static_cast<size_t>(operand.index);
    return operand.is_entry ? value(index) : constants_[index];
  }

  std::optional<Number> computed(const Entry& entry) {
    const Number &a = value_of(entry.operands[0]), &b = value_of(entry.operands[1]);
    if (a.kind == Number::Kind::scalar || b.kind == Number::Kind::scalar) return ask(entry);
    if (a.kind == Number::Kind::whole && b.kind == Number::Kind::whole && entry.sign != '/') {
      int64_t result = 0;
      const bool overflow = entry.sign == '+' ? __builtin_add_overflow(a.whole, b.whole, &result)
          : entry.sign == '-'                 ? __builtin_sub_overflow(a.whole, b.whole, &result)
                                              : __builtin_mul_overflow(a.whole, b.whole, &result);
      if (overflow) return {};
      return Number(result);
    }
    const auto x = a.as_double(), y = b.as_double();
    if (!x || !y || (entry.sign == '/' && *y == 0.0)) return {};
    switch (entry.sign) {
      case '+': return Number(*x + *y);
      case '-': return Number(*x - *y);
      case '*': return Number(*x * *y);
      default: return Number(*x / *y);
    }
  }

  // A hundred parameters of Adam have one step count: leaves with the same value in all steps so far are one leaf, and
  // their entries are computed once.
  bool stand_for_one_another(const std::vector<Number>& leaves) const {
    if (like_.size() != leaves.size() || same_as_.size() != entries_.size()) return false;
    for (size_t i = 0; i < leaves.size(); i++)
      if (like_[i] != i && !leaves[i].same(leaves[like_[i]])) return false;
    return true;
  }

  // Leaves that have differed once stay separate, so this happens a few times at most.
  void divide(const std::vector<Number>& leaves) {
    const auto before = like_.size() == leaves.size() ? like_ : std::vector<size_t>(leaves.size(), 0);
    like_.resize(leaves.size());
    for (size_t i = 0; i < leaves.size(); i++) {
      like_[i] = i;
      for (size_t j = 0; j < i && like_[i] == i; j++)
        if (like_[j] == j && before[j] == before[i] && leaves[j].same(leaves[i])) like_[i] = j;
    }
    std::map<std::vector<uintptr_t>, size_t> first;
    values_.assign(entries_.size(), Number(int64_t{0}));
    same_as_.resize(entries_.size());
    distinct_.clear();
    for (size_t i = 0; i < entries_.size(); i++) {
      const auto& entry = entries_[i];
      std::vector<uintptr_t> key{static_cast<uintptr_t>(entry.sign), reinterpret_cast<uintptr_t>(entry.function)};
      for (const auto& operand : entry.operands) {
        const auto index = static_cast<size_t>(operand.index);
        const uintptr_t place = entry.sign == 'x' ? like_[index] : operand.is_entry ? same_as_[index] : constant(index);
        key.insert(key.end(), {operand.is_entry, place});
      }
      same_as_[i] = static_cast<uint32_t>(first.try_emplace(std::move(key), i).first->second);
      if (same_as_[i] == i) distinct_.push_back(i);
    }
  }

  // The first constant with the same value.
  size_t constant(size_t index) const {
    for (size_t i = 0; i < index; i++)
      if (constants_[i].same(constants_[index]) ||
          (constants_[i].kind == Number::Kind::object && constants_[index].kind == Number::Kind::object &&
           constants_[i].object == constants_[index].object))
        return i;
    return index;
  }

  std::optional<Number> ask(const Entry& entry) {
    py::tuple arguments(entry.operands.size());
    for (size_t i = 0; i < entry.operands.size(); i++) arguments[i] = value_of(entry.operands[i]).boxed();
    PyObject* answer = PyObject_CallObject(entry.function, arguments.ptr());
    if (answer == nullptr) {
      PyErr_Clear();
      return {};
    }
    made_.push_back(py::reinterpret_steal<py::object>(answer));
    std::optional<Number> result = PyBool_Check(answer) ? Number(answer == Py_True) : Number::of(answer);
    if (!result) {
      result.emplace(int64_t{0});
      result->kind = Number::Kind::object;
      result->object = answer;
    }
    return result;
  }

  static bool is(const Number& value, PyObject* outcome) {
    if (value.kind == Number::Kind::floating && PyFloat_CheckExact(outcome))
      return value.floating == PyFloat_AS_DOUBLE(outcome);
    if (value.kind == Number::Kind::truth && PyBool_Check(outcome)) return (value.whole != 0) == (outcome == Py_True);
    const int differs = PyObject_RichCompareBool(value.boxed().ptr(), outcome, Py_NE);
    if (differs < 0) PyErr_Clear();
    return differs == 0;
  }

  std::vector<Entry> entries_;
  std::vector<Number> found_;
  std::vector<size_t> unproven_;
  std::vector<Number> constants_;
  std::vector<std::pair<int, py::object>> guards_;
  std::vector<py::object> kept_;
  std::vector<Number> values_;
  std::vector<size_t> like_;  // by leaf: the first leaf with the same value in every step
  std::vector<uint32_t> same_as_;
  std::vector<size_t> distinct_;
  std::vector<py::object> made_;
};

}  // namespace hocket
