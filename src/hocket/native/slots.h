// The working memory of one step: a value for each slot, and the numbers that ops take.

#pragma once

#include <Python.h>

#include <ATen/core/ivalue.h>

#include <vector>

namespace hocket {

struct Slots {
  std::vector<c10::IValue> slots_;
  std::vector<c10::IValue> numbers_;

  void clear() {
    for (auto& slot : slots_) slot = c10::IValue();
  }
};

// A number as ops take it; None where it is none, or too large.
c10::IValue as_number(PyObject* value);

}  // namespace hocket
