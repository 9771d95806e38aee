// How many threads a native kernel may use.

#pragma once

#include <ATen/Parallel.h>

#include <omp.h>

namespace hocket {

// A thread's first `parallel_for` sets its width to the process's, as torch does with every new thread; but whether it is
// new says a variable of which this library has a copy of its own, so it would happen to a lane in the middle of a step,
// after there was made room for as many threads as it has. Here it happens at once, and the width is put back.
inline void keep_width() {
  const int width = at::get_num_threads();
  at::internal::lazy_init_num_threads();
  if (at::get_num_threads() != width) omp_set_num_threads(width);  // of this thread only
}

}  // namespace hocket
