// The working memory of one step: a value for each slot, and the numbers that ops take.

#pragma once

#include <Python.h>

#include <ATen/core/ivalue.h>

#include <vector>

#include "standing_views.h"

namespace hocket {

struct Slots {
  virtual ~Slots() = default;

  // Run a step on the values in the slots.
  virtual void run_begun() = 0;
  // A step owns the slots from its begin to its end. Closed lanes run no steps.
  bool is_free() const { return !is_taken_ && !is_closed_; }

  bool is_taken_ = false;  // read and written under the interpreter's lock
  bool is_closed_ = false;
  std::vector<c10::IValue> slots_;
  std::vector<c10::IValue> numbers_;
  std::vector<StandingView> views_;

  void clear() {
    is_taken_ = false;
    for (auto& slot : slots_) slot = c10::IValue();
    for (auto& view : views_) view.let_go();
  }
};

// A number as an IValue for ops; None if the value is no number, or too large.
c10::IValue as_number(PyObject* value);

}  // namespace hocket
