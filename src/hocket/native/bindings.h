// The interfaces between the parts of the native core.

#pragma once

#include <pybind11/pybind11.h>

namespace hocket {

void bind_binding(pybind11::module& module);
void bind_direct(pybind11::module& module);
void bind_guards(pybind11::module& module);
void bind_interrupts(pybind11::module& module);
void bind_signature(pybind11::module& module);

// Conditions on a call and on Python state, under which a planned step may replace it.
struct Condition {
  virtual ~Condition() = default;
  virtual bool holds(PyObject* batch) = 0;
};

// A planned step: `begin`, then `run`, then `finish`. If `begin` returns false, nothing has changed.
struct BoundStep {
  virtual ~BoundStep() = default;
  virtual bool begin(PyObject* batch) = 0;
  virtual void run() = 0;
  virtual pybind11::list finish() = 0;
};

}  // namespace hocket
