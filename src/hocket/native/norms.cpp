// Batch norm of images that have their channels last, with its neighbours: forward with an addition and a ReLU, backward
// with the ReLU's mask and the sum of two gradients. Torch runs these as three or four passes over memory each.
//
// A tensor is a matrix of rows (pixels) and channels. Sums over rows are taken in float over blocks of rows, of values
// less the channel's first one (so that no variance is lost to a large mean), and added up in double.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#define HOCKET_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HOCKET_CLONES __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default"), optimize("O3")))
#else
#define HOCKET_CLONES
#endif

namespace {

constexpr int64_t kBlockRows = 64;       // summed in float
constexpr int64_t kGrainValues = 32768;  // for one thread at least

// The gradient of the norm's result: the sum of up to two, where the ReLU let the value through.
template <typename T>
struct Gradient {
  const T *first, *second, *result;

  HOCKET_INLINE float at(int64_t i) const {
    float value = static_cast<float>(first[i]);
    if (second) value += static_cast<float>(second[i]);
    return result && static_cast<float>(result[i]) <= 0.f ? 0.f : value;
  }
};

// Calls `work(c, integral_constant N)` for channels in pieces of N, so that accumulators stay in registers.
template <typename Work>
HOCKET_INLINE void in_pieces(int64_t channels, const Work& work) {
  int64_t c = 0;
  for (; c + 32 <= channels; c += 32) work(c, std::integral_constant<int, 32>{});
  for (; c + 8 <= channels; c += 8) work(c, std::integral_constant<int, 8>{});
  for (; c + 4 <= channels; c += 4) work(c, std::integral_constant<int, 4>{});
  for (; c < channels; ++c) work(c, std::integral_constant<int, 1>{});
}

// Adds to `sums` and `squares` of each channel those of (x - shift), over some rows.
template <typename T>
HOCKET_INLINE void add_moments(const T* x, const float* shift, int64_t rows, int64_t channels, double* sums,
                               double* squares) {
  for (int64_t from = 0; from < rows; from += kBlockRows) {
    const int64_t to = std::min(rows, from + kBlockRows);
    in_pieces(channels, [&](int64_t c, auto size) {
      constexpr int n = decltype(size)::value;
      float sum[n] = {}, square[n] = {};
      for (int64_t row = from; row < to; ++row)
        for (int j = 0; j < n; ++j) {
          const float value = static_cast<float>(x[row * channels + c + j]) - shift[c + j];
          sum[j] += value;
          square[j] += value * value;
        }
      for (int j = 0; j < n; ++j) sums[c + j] += sum[j], squares[c + j] += square[j];
    });
  }
}

template <typename T>
HOCKET_INLINE void scale_rows(const T* x, const T* added, const float* scale, const float* shift, bool relu,
                              int64_t rows, int64_t channels, T* y) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * channels;
    for (int64_t c = 0; c < channels; ++c) {
      float value = static_cast<float>(x[at + c]) * scale[c] + shift[c];
      if (added) value += static_cast<float>(added[at + c]);
      y[at + c] = static_cast<T>(relu && value < 0.f ? 0.f : value);  // a NaN stays one
    }
  }
}

template <typename T>
HOCKET_INLINE void keep_gradient(Gradient<T> gradient, int64_t count, T* __restrict kept) {
  for (int64_t i = 0; i < count; ++i) kept[i] = static_cast<T>(gradient.at(i));
}

// Adds to `sums` the gradient of each channel, and to `products` that times (x - mean).
template <typename T>
HOCKET_INLINE void add_gradients(Gradient<T> gradient, const T* x, const float* mean, int64_t rows, int64_t channels,
                                 double* sums, double* products) {
  for (int64_t from = 0; from < rows; from += kBlockRows) {
    const int64_t to = std::min(rows, from + kBlockRows);
    in_pieces(channels, [&](int64_t c, auto size) {
      constexpr int n = decltype(size)::value;
      float sum[n] = {}, product[n] = {};
      for (int64_t row = from; row < to; ++row)
        for (int j = 0; j < n; ++j) {
          const int64_t at = row * channels + c + j;
          const float value = gradient.at(at);
          sum[j] += value;
          product[j] += value * (static_cast<float>(x[at]) - mean[c + j]);
        }
      for (int j = 0; j < n; ++j) sums[c + j] += sum[j], products[c + j] += product[j];
    });
  }
}

// dx = a * gradient + b * x + c, for each channel.
template <typename T>
HOCKET_INLINE void combine_rows(Gradient<T> gradient, const T* x, const float* a, const float* b, const float* c,
                                int64_t rows, int64_t channels, T* dx) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t j = 0; j < channels; ++j) {
      const int64_t at = row * channels + j;
      dx[at] = static_cast<T>(a[j] * gradient.at(at) + (b[j] * static_cast<float>(x[at]) + c[j]));
    }
}

// The same for each dtype, compiled for several kinds of vector units.
#define HOCKET_KERNELS(T)                                                                                            \
  HOCKET_CLONES void moments_of(const T* x, const float* shift, int64_t rows, int64_t channels, double* sums,        \
                                double* squares) {                                                                   \
    add_moments<T>(x, shift, rows, channels, sums, squares);                                                         \
  }                                                                                                                  \
  HOCKET_CLONES void scaled(const T* x, const T* added, const float* scale, const float* shift, bool relu,           \
                            int64_t rows, int64_t channels, T* y) {                                                  \
    if (added && relu) return scale_rows<T>(x, added, scale, shift, true, rows, channels, y);                        \
    if (added) return scale_rows<T>(x, added, scale, shift, false, rows, channels, y);                               \
    if (relu) return scale_rows<T>(x, nullptr, scale, shift, true, rows, channels, y);                               \
    scale_rows<T>(x, nullptr, scale, shift, false, rows, channels, y);                                               \
  }                                                                                                                  \
  HOCKET_CLONES void gradients_of(Gradient<T> g, const T* x, const float* mean, int64_t rows, int64_t channels,      \
                                  double* sums, double* products, T* kept) {                                         \
    /* Kept while it is in the cache: reading and writing in one loop would not be vectorized. */                    \
    for (int64_t from = 0; kept && from < rows; from += kBlockRows) {                                                \
      const int64_t count = std::min(kBlockRows, rows - from), at = from * channels;                                 \
      const Gradient<T> part{g.first + at, g.second ? g.second + at : nullptr, g.result + at};                       \
      if (part.second) keep_gradient<T>({part.first, part.second, part.result}, count * channels, kept + at);        \
      else keep_gradient<T>({part.first, nullptr, part.result}, count * channels, kept + at);                        \
      add_gradients<T>({kept + at, nullptr, nullptr}, x + at, mean, count, channels, sums, products);                \
    }                                                                                                                \
    if (kept) return;                                                                                                \
    if (g.second && g.result)                                                                                        \
      return add_gradients<T>({g.first, g.second, g.result}, x, mean, rows, channels, sums, products);               \
    if (g.result) return add_gradients<T>({g.first, nullptr, g.result}, x, mean, rows, channels, sums, products);    \
    add_gradients<T>({g.first, nullptr, nullptr}, x, mean, rows, channels, sums, products);                          \
  }                                                                                                                  \
  HOCKET_CLONES void combined(Gradient<T> g, const T* x, const float* a, const float* b, const float* c,             \
                              int64_t rows, int64_t channels, T* dx) {                                               \
    if (g.second && g.result)                                                                                        \
      return combine_rows<T>({g.first, g.second, g.result}, x, a, b, c, rows, channels, dx);                         \
    if (g.result) return combine_rows<T>({g.first, nullptr, g.result}, x, a, b, c, rows, channels, dx);              \
    if (g.second) return combine_rows<T>({g.first, g.second, nullptr}, x, a, b, c, rows, channels, dx);              \
    combine_rows<T>({g.first, nullptr, nullptr}, x, a, b, c, rows, channels, dx);                                    \
  }
HOCKET_KERNELS(float)
HOCKET_KERNELS(c10::BFloat16)
#undef HOCKET_KERNELS

// Rows in parallel. `work(first, last, sums, others)` adds to rows of doubles of its own thread; back come their sums.
template <typename Work>
std::vector<double> summed(int64_t rows, int64_t channels, const Work& work) {
  const int64_t threads = std::max(1, at::get_num_threads());
  std::vector<double> parts(threads * 2 * channels, 0.0);
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrainValues / channels), [&](int64_t first, int64_t last) {
    double* own = &parts[at::get_thread_num() * 2 * channels];
    work(first, last, own, own + channels);
  });
  for (int64_t thread = 1; thread < threads; ++thread)
    for (int64_t i = 0; i < 2 * channels; ++i) parts[i] += parts[thread * 2 * channels + i];
  parts.resize(2 * channels);
  return parts;
}

at::Tensor last(const at::Tensor& image) { return image.contiguous(at::MemoryFormat::ChannelsLast); }

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
  std::vector<float> shift(data, data + channels), scale(channels);
  const auto sums = summed(rows, channels, [&](int64_t first, int64_t last, double* sum, double* square) {
    moments_of(data + first * channels, shift.data(), last - first, channels, sum, square);
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
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrainValues / channels), [&](int64_t first, int64_t last) {
    const int64_t at = first * channels;
    scaled(data + at, other ? other + at : nullptr, scale.data(), shift.data(), relu, last - first, channels, to + at);
  });
  return {y, mean, invstd};
}

template <typename T>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& gradient, const std::optional<at::Tensor>& second, const std::optional<at::Tensor>& result,
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& invstd, bool keep) {
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  auto dx = at::empty_like(x), dw = at::empty({channels}, weight.options()), db = at::empty_like(dw);
  auto kept = keep ? at::empty_like(x) : at::empty({0}, x.options());
  const T* data = x.const_data_ptr<T>();
  const Gradient<T> whole{gradient.const_data_ptr<T>(), data_of<T>(second), data_of<T>(result)};
  const auto from = [&](int64_t at) {
    return Gradient<T>{whole.first + at, whole.second ? whole.second + at : nullptr,
                       whole.result ? whole.result + at : nullptr};
  };
  const float *m = mean.const_data_ptr<float>(), *s = invstd.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  T* copy = keep ? kept.mutable_data_ptr<T>() : nullptr;
  const auto sums = summed(rows, channels, [&](int64_t first, int64_t last, double* sum, double* product) {
    const int64_t at = first * channels;
    gradients_of(from(at), data + at, m, last - first, channels, sum, product, copy ? copy + at : nullptr);
  });
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
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrainValues / channels), [&](int64_t first, int64_t last) {
    const int64_t at = first * channels;
    const Gradient<T> own = copy ? Gradient<T>{copy + at, nullptr, nullptr} : from(at);
    combined(own, data + at, a.data(), b.data(), c.data(), last - first, channels, to + at);
  });
  return {dx, dw, db, kept};
}

std::optional<at::Tensor> last(const std::optional<at::Tensor>& image) {
  return image ? std::optional<at::Tensor>(last(*image)) : std::nullopt;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& weight,
                                                            const at::Tensor& bias, at::Tensor running_mean,
                                                            at::Tensor running_var, double momentum, double eps,
                                                            bool relu, const std::optional<at::Tensor>& added) {
  const auto run = x.scalar_type() == at::kBFloat16 ? &forward<c10::BFloat16> : &forward<float>;
  return run(last(x), weight, bias, running_mean, running_var, momentum, eps, relu, last(added));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_backward(
    const at::Tensor& gradient, const std::optional<at::Tensor>& second, const std::optional<at::Tensor>& result,
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& invstd, bool keep) {
  TORCH_CHECK(result || !(keep || second), "norm_backward: only a gradient that a ReLU masks is added up or kept");
  const auto run = x.scalar_type() == at::kBFloat16 ? &backward<c10::BFloat16> : &backward<float>;
  return run(last(gradient), last(second), last(result), last(x), weight, mean, invstd, keep);
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
