#pragma once

#include <pybind11/pybind11.h>

namespace hocket {

void bind_binding(pybind11::module& module);
void bind_guards(pybind11::module& module);
void bind_interrupts(pybind11::module& module);
void bind_signature(pybind11::module& module);

}  // namespace hocket
