// Shared by native ops: their number of threads, and the layout of images.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <omp.h>

#include <cstdint>
#include <optional>

namespace hocket {

constexpr int64_t kGrainValues = 32768;  // for one thread at least

// A thread's first `parallel_for` sets its width to the process's, as torch does with every new thread; but whether it is
// new says a variable of which this library has a copy of its own, so it would happen to a lane in the middle of a step,
// after there was made room for as many threads as it has. Here it happens at once, and the width is put back.
inline void keep_width() {
  const int width = at::get_num_threads();
  at::internal::lazy_init_num_threads();
  if (at::get_num_threads() != width) omp_set_num_threads(width);  // of this thread only
}

inline at::Tensor to_channels_last(const at::Tensor& image) { return image.contiguous(at::MemoryFormat::ChannelsLast); }

inline std::optional<at::Tensor> to_channels_last(const std::optional<at::Tensor>& image) {
  return image ? std::optional(to_channels_last(*image)) : std::nullopt;
}

}  // namespace hocket
