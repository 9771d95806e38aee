// Batch norm of channels-last images, fused with its neighbours: forward with an addition and a ReLU, backward with the
// ReLU's mask and the sum of two gradients. Torch makes three or four passes over memory for each.
//
// A tensor is a matrix of rows (pixels) and channels, read row by row in the order of memory: several rows at a time, or
// some channels of many rows, take up to twice as long for tensors larger than the cache. Sums over rows are in float
// within blocks of rows and in double over blocks; the channel's first value is subtracted before, so that no variance is
// lost to a large mean.

#include "clones.h"
#include "ops.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#define HOCKET_INLINE inline __attribute__((always_inline))

namespace {

using namespace hocket;

constexpr int64_t kBlockRows = 64;       // summed in float

HOCKET_INLINE float widened(float value) { return value; }
HOCKET_INLINE float widened(c10::BFloat16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.x) << 16);
}

HOCKET_INLINE void put(float value, float& to) { to = value; }
HOCKET_INLINE void put(float value, c10::BFloat16& to) {  // round to nearest, ties to even
  const auto bits = __builtin_bit_cast(uint32_t, value);
  to.x = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The gradient of the norm's result: the sum of up to two, times the ReLU's mask. Without a branch, which would be
// mispredicted for half of the values.
template <typename T, bool kAdds, bool kMasks>
struct Gradient {
  const T *first, *second, *result;

  HOCKET_INLINE float at(int64_t i) const {
    float value = widened(first[i]);
    if constexpr (kAdds) value += widened(second[i]);
    if constexpr (!kMasks) return value;
    const uint32_t all_bits = static_cast<uint32_t>(widened(result[i]) <= 0.f) - 1u;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, value) & all_bits);
  }
};

// Adds to `sums` and `others` of each channel what `add(i, channel, sum, other)` adds for its values. `own`: memory
// of two floats for each channel.
template <typename Add>
HOCKET_INLINE void add_rows(int64_t rows, int64_t channels, float* __restrict own, double* sums, double* others,
                            const Add& add) {
  float* __restrict sum = own;
  float* __restrict other = own + channels;
  for (int64_t from = 0; from < rows; from += kBlockRows) {
    const int64_t to = std::min(rows, from + kBlockRows);
    for (int64_t c = 0; c < channels; ++c) sum[c] = other[c] = 0.f;
    for (int64_t row = from; row < to; ++row) {
      HOCKET_APART
      for (int64_t c = 0; c < channels; ++c) add(row * channels + c, c, sum[c], other[c]);
    }
    for (int64_t c = 0; c < channels; ++c) sums[c] += sum[c], others[c] += other[c];
  }
}

// The sums of (x - shift) and of their squares.
template <typename T>
HOCKET_INLINE void add_moments(const T* x, const float* shift, int64_t rows, int64_t channels, float* own, double* sums,
                               double* squares) {
  add_rows(rows, channels, own, sums, squares,
           [=](int64_t i, int64_t c, float& sum, float& square) __attribute__((always_inline)) {
             const float value = widened(x[i]) - shift[c];
             sum += value;
             square += value * value;
           });
}

// The sums of the gradient, and of that times (x - mean).
template <typename T, typename G>
HOCKET_INLINE void add_gradients(G gradient, const T* x, const float* mean, int64_t rows, int64_t channels, float* own,
                                 double* sums, double* products) {
  add_rows(rows, channels, own, sums, products,
           [=](int64_t i, int64_t c, float& sum, float& product) __attribute__((always_inline)) {
             const float value = gradient.at(i);
             sum += value;
             product += value * (widened(x[i]) - mean[c]);
           });
}

template <typename T, bool kAdds, bool kRelu>
HOCKET_INLINE void scale_rows(const T* x, const T* added, const float* scale, const float* shift, int64_t rows,
                              int64_t channels, T* __restrict y) {
  for (int64_t row = 0; row < rows; ++row) {
    HOCKET_APART
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t i = row * channels + c;
      float value = widened(x[i]) * scale[c] + shift[c];
      if constexpr (kAdds) value += widened(added[i]);
      if constexpr (kRelu) value = value < 0.f ? 0.f : value;  // keeps NaN
      put(value, y[i]);
    }
  }
}

template <typename T, typename G>
HOCKET_INLINE void keep_gradient(G gradient, int64_t count, T* __restrict kept) {
  HOCKET_APART
  for (int64_t i = 0; i < count; ++i) put(gradient.at(i), kept[i]);
}

// dx = a * gradient + b * x + c, for each channel.
template <typename T, typename G>
HOCKET_INLINE void combine_rows(G gradient, const T* x, const float* a, const float* b, const float* c, int64_t rows,
                                int64_t channels, T* __restrict dx) {
  for (int64_t row = 0; row < rows; ++row) {
    HOCKET_APART
    for (int64_t j = 0; j < channels; ++j) {
      const int64_t i = row * channels + j;
      put(a[j] * gradient.at(i) + (b[j] * widened(x[i]) + c[j]), dx[i]);
    }
  }
}

// The pointers of a backward; null: not given. A second gradient comes only with a result.
template <typename T>
struct Given {
  const T *first, *second, *result;

  Given from(int64_t i) const { return {first + i, second ? second + i : nullptr, result ? result + i : nullptr}; }

  // Call `work` with the gradient of that kind.
  template <typename Work>
  HOCKET_INLINE void as_gradient(const Work& work) const {
    if (second) work(Gradient<T, true, true>{first, second, result});
    else if (result) work(Gradient<T, false, true>{first, nullptr, result});
    else work(Gradient<T, false, false>{first, nullptr, nullptr});
  }
};

// The passes for each dtype, compiled for several instruction sets. The functions that they call are inlined, since they
// would be compiled for the oldest set otherwise.
#define HOCKET_KERNELS(T)                                                                                            \
  HOCKET_CLONES void moments_of(const T* x, const float* shift, int64_t rows, int64_t channels, float* own,          \
                                double* sums, double* squares) {                                                     \
    add_moments<T>(x, shift, rows, channels, own, sums, squares);                                                    \
  }                                                                                                                  \
  HOCKET_CLONES void scaled(const T* x, const T* added, const float* scale, const float* shift, bool relu,           \
                            int64_t rows, int64_t channels, T* y) {                                                  \
    if (added && relu) scale_rows<T, true, true>(x, added, scale, shift, rows, channels, y);                         \
    else if (added) scale_rows<T, true, false>(x, added, scale, shift, rows, channels, y);                           \
    else if (relu) scale_rows<T, false, true>(x, nullptr, scale, shift, rows, channels, y);                          \
    else scale_rows<T, false, false>(x, nullptr, scale, shift, rows, channels, y);                                   \
  }                                                                                                                  \
  HOCKET_CLONES void gradients_of(Given<T> given, const T* x, const float* mean, int64_t rows, int64_t channels,     \
                                  float* own, double* sums, double* products) {                                      \
    given.as_gradient([=](auto gradient) __attribute__((always_inline)) {                                            \
      add_gradients<T>(gradient, x, mean, rows, channels, own, sums, products);                                      \
    });                                                                                                              \
  }                                                                                                                  \
  HOCKET_CLONES void keep(Given<T> given, int64_t count, T* kept) {                                                  \
    given.as_gradient(                                                                                               \
        [=](auto gradient) __attribute__((always_inline)) { keep_gradient<T>(gradient, count, kept); });             \
  }                                                                                                                  \
  HOCKET_CLONES void combined(Given<T> given, const T* x, const float* a, const float* b, const float* c,            \
                              int64_t rows, int64_t channels, T* dx) {                                               \
    given.as_gradient([=](auto gradient) __attribute__((always_inline)) {                                            \
      combine_rows<T>(gradient, x, a, b, c, rows, channels, dx);                                                     \
    });                                                                                                              \
  }
HOCKET_KERNELS(float)
HOCKET_KERNELS(c10::BFloat16)
#undef HOCKET_KERNELS

// Run `work(first, last)` on ranges of rows in parallel.
template <typename Work>
void in_parallel(int64_t rows, int64_t channels, const Work& work) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrainValues / channels), work);
}

// Two sums over all rows for each channel, of the values that `work(first, last, own, sums, others)` adds.
template <typename Work>
std::vector<double> summed(int64_t rows, int64_t channels, const Work& work) {
  keep_width();
  const int64_t threads = std::max(1, at::get_num_threads());
  std::vector<double> parts(threads * 2 * channels, 0.0);
  in_parallel(rows, channels, [&](int64_t first, int64_t last) {
    std::vector<float> own(2 * channels);
    double* part = &parts[at::get_thread_num() * 2 * channels];
    work(first, last, own.data(), part, part + channels);
  });
  for (int64_t thread = 1; thread < threads; ++thread)
    for (int64_t i = 0; i < 2 * channels; ++i) parts[i] += parts[thread * 2 * channels + i];
  parts.resize(2 * channels);
  return parts;
}

template <typename T>
const T* data_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

template <typename T>
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& weight,
                                                       const at::Tensor& bias, at::Tensor& running_mean,
                                                       at::Tensor& running_var, double momentum, double eps, bool relu,
                                                       const std::optional<at::Tensor>& added) {
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  auto y = at::empty_like(x), mean = at::empty({channels}, weight.options()), invstd = at::empty_like(mean);
  const T* data = x.const_data_ptr<T>();
  std::vector<float> shift(channels), scale(channels);
  for (int64_t c = 0; c < channels; ++c) shift[c] = widened(data[c]);
  const auto sums = summed(rows, channels, [&](int64_t first, int64_t last, float* own, double* sum, double* square) {
    moments_of(data + first * channels, shift.data(), last - first, channels, own, sum, square);
  });
  const float *w = weight.const_data_ptr<float>(), *b = bias.const_data_ptr<float>();
  float *m = mean.mutable_data_ptr<float>(), *s = invstd.mutable_data_ptr<float>();
  float *rm = running_mean.mutable_data_ptr<float>(), *rv = running_var.mutable_data_ptr<float>();
  for (int64_t c = 0; c < channels; ++c) {
    const double off = sums[c] / rows, center = shift[c] + off;
    const double variance = std::max(0.0, sums[channels + c] / rows - off * off);
    if (std::isnan(sums[channels + c])) s[c] = std::nanf("");
    else s[c] = static_cast<float>(1 / std::sqrt(variance + eps));
    m[c] = static_cast<float>(center);
    const double unbiased = std::isnan(s[c]) ? std::nan("") : variance * rows / (rows - 1);
    rm[c] = static_cast<float>(momentum * center + (1 - momentum) * rm[c]);
    rv[c] = static_cast<float>(momentum * unbiased + (1 - momentum) * rv[c]);
    scale[c] = s[c] * w[c];
    shift[c] = b[c] - m[c] * scale[c];
  }
  T* to = y.mutable_data_ptr<T>();
  const T* other = data_of<T>(added);
  in_parallel(rows, channels, [&](int64_t first, int64_t last) {
    const int64_t at = first * channels;
    scaled(data + at, other ? other + at : nullptr, scale.data(), shift.data(), relu, last - first, channels, to + at);
  });
  return {y, mean, invstd};
}

template <typename T>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& gradient, const std::optional<at::Tensor>& second, const std::optional<at::Tensor>& result,
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& invstd, bool keeps) {
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  auto dx = at::empty_like(x), dw = at::empty({channels}, weight.options()), db = at::empty_like(dw);
  auto kept = keeps ? at::empty_like(x) : at::empty({0}, x.options());
  const T* data = x.const_data_ptr<T>();
  Given<T> given{gradient.const_data_ptr<T>(), data_of<T>(second), data_of<T>(result)};
  const float *m = mean.const_data_ptr<float>(), *s = invstd.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  T* copy = keeps ? kept.mutable_data_ptr<T>() : nullptr;
  const auto sums = summed(rows, channels, [&](int64_t first, int64_t last, float* own, double* sum, double* product) {
    // Copied block by block, while it is in the cache: one loop that reads and writes would not be vectorized.
    for (int64_t from = first; from < last; from += kBlockRows) {
      const int64_t block = std::min(kBlockRows, last - from), at = from * channels;
      if (copy) keep(given.from(at), block * channels, copy + at);
      const Given<T> part = copy ? Given<T>{copy + at, nullptr, nullptr} : given.from(at);
      gradients_of(part, data + at, m, block, channels, own, sum, product);
    }
  });
  if (copy) given = {copy, nullptr, nullptr};
  float *dwp = dw.mutable_data_ptr<float>(), *dbp = db.mutable_data_ptr<float>();
  std::vector<float> a(channels), b(channels), c(channels);
  for (int64_t j = 0; j < channels; ++j) {
    const double scale = static_cast<double>(w[j]) * s[j], slope = -scale * s[j] * s[j] * sums[channels + j] / rows;
    dwp[j] = static_cast<float>(sums[channels + j] * s[j]);
    dbp[j] = static_cast<float>(sums[j]);
    a[j] = static_cast<float>(scale);
    b[j] = static_cast<float>(slope);
    c[j] = static_cast<float>(-scale * sums[j] / rows - slope * m[j]);
  }
  T* to = dx.mutable_data_ptr<T>();
  in_parallel(rows, channels, [&](int64_t first, int64_t last) {
    const int64_t at = first * channels;
    combined(given.from(at), data + at, a.data(), b.data(), c.data(), last - first, channels, to + at);
  });
  return {dx, dw, db, kept};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& weight,
                                                            const at::Tensor& bias, at::Tensor running_mean,
                                                            at::Tensor running_var, double momentum, double eps,
                                                            bool relu, const std::optional<at::Tensor>& added) {
  const auto run = x.scalar_type() == at::kBFloat16 ? &forward<c10::BFloat16> : &forward<float>;
  return run(to_channels_last(x), weight, bias, running_mean, running_var, momentum, eps, relu, to_channels_last(added));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_backward(
    const at::Tensor& gradient, const std::optional<at::Tensor>& second, const std::optional<at::Tensor>& result,
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& invstd, bool keep) {
  TORCH_CHECK(result || !(keep || second), "norm_backward: only a gradient that a ReLU masks is added up or kept");
  const auto run = x.scalar_type() == at::kBFloat16 ? &backward<c10::BFloat16> : &backward<float>;
  return run(to_channels_last(gradient), to_channels_last(second), to_channels_last(result), to_channels_last(x), weight, mean,
             invstd, keep);
}

}  // namespace

TORCH_LIBRARY(hocket, library) {
  library.def(
      "norm_forward(Tensor x, Tensor weight, Tensor bias, Tensor(a!) running_mean, Tensor(b!) running_var, "
      "float momentum, float eps, bool relu, Tensor? added) -> (Tensor, Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor gradient, Tensor? second, Tensor? result, Tensor x, Tensor weight, Tensor mean, "
      "Tensor invstd, bool keep) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(hocket, CPU, library) {
  library.impl("norm_forward", norm_forward);
  library.impl("norm_backward", norm_backward);
}
