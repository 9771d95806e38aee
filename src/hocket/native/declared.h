// Functions of torch whose own headers take the compiler seconds: they include TorchScript, or every op.
//
// The declarations are those of torch 2.13 and 2.14. Parameters are part of a symbol's name, so the core does not load
// with a torch that has others, and Python's lanes say why.

#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace torch::jit {  // torch/csrc/jit/python/pybind_utils.h

TORCH_PYTHON_API c10::IValue toIValue(py::handle object, const c10::TypePtr& type, std::optional<int32_t> length);
TORCH_PYTHON_API py::object toPyObject(c10::IValue value);

}  // namespace torch::jit

namespace at::autocast {  // ATen/autocast_mode.h

TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API bool is_autocast_cache_enabled();

}  // namespace at::autocast
