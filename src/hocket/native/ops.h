// Shared by native ops: their number of threads, and the layout of images.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <omp.h>

#include <cstdint>
#include <optional>

namespace hocket {

constexpr int64_t kGrainValues = 32768;  // for one thread at least

// The first `parallel_for` of a thread sets its number of threads to the process's. The flag for "first" is a variable of
// which each library has its own copy, so for our ops this would happen on a lane in the middle of a step, after the lane
// has set its width. Here it happens before, and the width is restored.
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
