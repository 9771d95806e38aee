// What the parts of the native core know of one another.

#pragma once

#include <pybind11/pybind11.h>

namespace hocket {

void bind_binding(pybind11::module& module);
void bind_direct(pybind11::module& module);
void bind_guards(pybind11::module& module);
void bind_interrupts(pybind11::module& module);
void bind_signature(pybind11::module& module);

// What has to hold of a call, and of the Python state that it meets, for a planned step to stand for it.
struct Condition {
  virtual ~Condition() = default;
  virtual bool holds(PyObject* batch) = 0;
};

// A planned step: `begin` has changed nothing where it says no; after it `run`, then `finish`.
struct BoundStep {
  virtual ~BoundStep() = default;
  virtual bool begin(PyObject* batch) = 0;
  virtual void run() = 0;
  virtual pybind11::list finish() = 0;
};

}  // namespace hocket
