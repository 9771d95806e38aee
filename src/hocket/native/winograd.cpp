// Convolutions by Winograd's algorithm, and their gradients, for channels-last images of float32: filters of 3 x 3 with
// stride 1, and of 4 x 4 with stride 2. Their rounding differs from torch's, and is not larger.
//
// A convolution of 4 x 4 with stride 2 is the sum of four of 2 x 2 with stride 1: of the even and odd rows and columns
// of the image, by those of the filters. Transposed convolutions are the gradients of the input of others.
//
// The gradient of the filters has parts (of some channels of both images), each summed over all tiles. If there are few
// parts, threads share the tiles.

#include "ops.h"
#include "winograd_blocks.h"

#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace {

using namespace hocket;
using namespace hocket::winograd;

constexpr int64_t kMinChannels = 8;       // a vector that begins in a pixel ends in the next one
constexpr int64_t kGrainSums = 16 << 10;  // for one thread at least

// The kernels for a kind of vector units and a size of filters.
struct Kernels {
  int64_t tiles, places;
  std::vector<Panel> (*panels)(int64_t);
  void (*pack)(const std::vector<Filters>&, Panel, float*);
  void (*convolve)(const Convolution&, const std::vector<Panel>&, const float*, const float*, float*, int64_t, int64_t);
  void (*sum_products)(const Convolution&, const Part&, float*, int64_t, int64_t, float*);
  void (*finish)(const Part&, const float*, int64_t, int64_t, float*, at::IntArrayRef);
};

#define HOCKET_KERNELS(NAME, UNIT, SCHEME, ...)                                                                       \
  __VA_ARGS__ void pack_##NAME##SCHEME(const std::vector<Filters>& w, Panel panel, float* to) {                       \
    pack<SCHEME<UNIT::Vector>>(w, panel, to);                                                                         \
  }                                                                                                                   \
  __VA_ARGS__ void convolve_##NAME##SCHEME(const Convolution& c, const std::vector<Panel>& panels,                    \
                                           const float* filters, const float* bias, float* memory, int64_t first,     \
                                           int64_t last) {                                                            \
    convolve<UNIT, SCHEME<UNIT::Vector>>(c, panels, filters, bias, memory, first, last);                              \
  }                                                                                                                   \
  __VA_ARGS__ void sum_products_##NAME##SCHEME(const Convolution& c, const Part& part, float* memory, int64_t first,  \
                                               int64_t last, float* sums) {                                           \
    sum_products<UNIT, SCHEME<UNIT::Vector>>(c, part, memory, first, last, sums);                                     \
  }                                                                                                                   \
  const Kernels k##NAME##SCHEME{                                                                                      \
      UNIT::kTiles,           SCHEME<UNIT::Vector>::kPlaces, panels_of<UNIT>,                                         \
      pack_##NAME##SCHEME,    convolve_##NAME##SCHEME,       sum_products_##NAME##SCHEME,                             \
      finish<SCHEME<UNIT::Vector>>};

HOCKET_KERNELS(Any, Other, ThreeTaps)
HOCKET_KERNELS(Any, Other, TwoTaps)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HOCKET_AVX2 __attribute__((optimize("O3"), target("avx2,fma")))
#define HOCKET_AVX512 __attribute__((optimize("O3"), target("avx2,fma,avx512f,prefer-vector-width=512")))
HOCKET_KERNELS(Avx2, Narrow, ThreeTaps, HOCKET_AVX2)
HOCKET_KERNELS(Avx2, Narrow, TwoTaps, HOCKET_AVX2)
HOCKET_KERNELS(Avx512, Wide, ThreeTaps, HOCKET_AVX512)
HOCKET_KERNELS(Avx512, Wide, TwoTaps, HOCKET_AVX512)

const Kernels& kernels(bool strided) {
  // The instruction set that torch's kernels may use: ATEN_CPU_CAPABILITY applies here, too.
  static const std::string torchs = at::get_cpu_capability();
  static const bool wide = torchs == "AVX512" && __builtin_cpu_supports("avx512f");
  static const bool narrow = torchs != "DEFAULT" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (strided) return wide ? kAvx512TwoTaps : narrow ? kAvx2TwoTaps : kAnyTwoTaps;
  return wide ? kAvx512ThreeTaps : narrow ? kAvx2ThreeTaps : kAnyThreeTaps;
}
#else
const Kernels& kernels(bool strided) { return strided ? kAnyTwoTaps : kAnyThreeTaps; }
#endif
#undef HOCKET_KERNELS

// Kernels only read where an image is given.
Image image_of(const at::Tensor& x) {
  const int64_t channels = x.size(1), row = x.size(3) * channels;
  auto* data = const_cast<float*>(x.const_data_ptr<float>());
  return {data, x.size(0), x.size(2), x.size(3), channels, x.size(2) * row, row, channels};
}

Filters filters_of(const at::Tensor& weight) {
  const auto s = weight.strides();
  return {weight.const_data_ptr<float>(), weight.size(0), weight.size(1), s[0], s[1], s[2], s[3]};
}

// For the input's gradient: the sum is over output channels, with filters rotated by 180 degrees.
Filters turned(const Filters& w, int64_t taps) {
  return {w.data + (taps - 1) * (w.row_stride + w.column_stride), w.summed, w.made, w.summed_stride, w.made_stride,
          -w.row_stride, -w.column_stride};
}

// For a convolution with stride 2 and this padding: result y reads rows (or columns) 2 (y + tap) + parity - padding,
// which are rows y + tap - padding' of the half that begins with row `first`.
struct Half {
  int64_t parity, first, padding;
  Half(int64_t parity, int64_t given)
      : parity(parity), first((parity + given) % 2), padding((given - parity + first) / 2) {}
};

Filters half(const Filters& w, const Half& y, const Half& x) {
  return {w.data + y.parity * w.row_stride + x.parity * w.column_stride,
          w.made, w.summed, w.made_stride, w.summed_stride, 2 * w.row_stride, 2 * w.column_stride};
}

template <typename Function>
void for_halves(at::IntArrayRef padding, const Function& function) {
  for (int64_t parity = 0; parity < 4; ++parity) function(Half(parity / 2, padding[0]), Half(parity % 2, padding[1]));
}

// A convolution with stride 1, of one image or of the halves of one.
void convolve(const std::vector<Source>& sources, const std::vector<Filters>& filters, const Image& y,
              const std::optional<at::Tensor>& bias, const Kernels& kernel, const at::TensorOptions& options) {
  const int64_t made = filters[0].made, summed = sources.size() * filters[0].summed;
  const auto panels = kernel.panels(made);
  const Convolution c{sources, y, Scratch(kernel.places, summed, filters[0].summed, kernel.tiles)};
  const int64_t threads = std::max(1, at::get_num_threads()), size = c.scratch.size(), tiles = c.num_tiles();
  std::vector<int64_t> starts{padded(made)};
  for (const Panel panel : panels) starts.push_back(starts.back() + kernel.places * summed * panel.count * kLanes);
  auto memory = at::empty({starts.back() + threads * size}, options);
  float *biases = memory.mutable_data_ptr<float>(), *own = biases + starts.back();
  if (bias) std::memcpy(biases, bias->contiguous().const_data_ptr<float>(), made * sizeof(float));
  const int64_t grain = std::max<int64_t>(1, kGrainSums / (kLanes * summed));
  at::parallel_for(0, panels.size(), grain, [&](int64_t from, int64_t to) {
    for (int64_t p = from; p < to; ++p) kernel.pack(filters, panels[p], biases + starts[p]);
  });
  const int64_t units = (tiles + kernel.tiles - 1) / kernel.tiles;
  at::parallel_for(0, units, 1, [&](int64_t from, int64_t to) {
    kernel.convolve(c, panels, biases + starts[0], bias ? biases : nullptr, own + at::get_thread_num() * size,
                    from * kernel.tiles, std::min(tiles, to * kernel.tiles));
  });
}

// The gradient of filters, of which the strides are given, of a convolution with stride 1.
void sum_products(const Source& source, const Image& dy, float* gradient, at::IntArrayRef strides,
                  const Kernels& kernel, const at::TensorOptions& options) {
  const int64_t channels = source.x.channels, made = dy.channels;
  // As many vectors of channels as fit; more of one image if the other has few.
  const auto most_beside = [](int64_t others) {
    return kPartSums / padded(std::min<int64_t>(others, 64)) / kLanes * kLanes;
  };
  const int64_t rows = most_beside(made), columns = most_beside(channels);
  std::vector<Part> parts;
  for (int64_t c = 0; c < channels; c += rows)
    for (int64_t k = 0; k < made; k += columns)
      parts.push_back({c, std::min(rows, channels - c), k, std::min(columns, made - k)});
  const Convolution c{{source}, dy, Scratch(kernel.places, parts[0].rows, std::max(channels, made), kernel.tiles)};
  const int64_t threads = std::max(1, at::get_num_threads()), num_parts = parts.size(), tiles = c.num_tiles();
  const int64_t splits = num_parts >= 4 * threads ? 1 : std::min(threads, tiles);
  const int64_t size = c.scratch.size(), sums_size = kernel.places * padded(parts[0].rows) * parts[0].stride();
  const int64_t num_sums = splits == 1 ? threads : splits * num_parts;
  auto memory = at::empty({threads * size + num_sums * sums_size}, options);
  float *own = memory.mutable_data_ptr<float>(), *sums = own + threads * size;
  at::parallel_for(0, splits * num_parts, 1, [&](int64_t from, int64_t to) {
    const int64_t thread = at::get_thread_num();
    for (int64_t item = from; item < to; ++item) {
      const int64_t split = item / num_parts, part = item % num_parts;
      float* sum = sums + (splits == 1 ? thread : part * splits + split) * sums_size;
      kernel.sum_products(c, parts[part], own + thread * size, tiles * split / splits, tiles * (split + 1) / splits,
                          sum);
      if (splits == 1) kernel.finish(parts[part], sum, 0, 1, gradient, strides);
    }
  });
  if (splits > 1)
    at::parallel_for(0, num_parts, 1, [&](int64_t from, int64_t to) {
      for (int64_t part = from; part < to; ++part)
        kernel.finish(parts[part], sums + part * splits * sums_size, sums_size, splits, gradient, strides);
    });
}

void expect(const at::Tensor& image, const at::Tensor& other, at::IntArrayRef padding, const char* who) {
  for (const auto& each : {image, other})
    TORCH_CHECK(each.dim() == 4 && each.scalar_type() == at::kFloat && each.size(1) >= kMinChannels, who,
                ": four dimensions, float32, and at least ", kMinChannels, " channels are needed, not ", each.sizes());
  TORCH_CHECK(padding.size() == 2 && std::min(padding[0], padding[1]) >= 0 && std::max(padding[0], padding[1]) <= 2,
              who, ": there is padding by 0, 1 and 2, not ", padding);
}

// True for a convolution of 4 x 4 with stride 2, by the size of the filters. The vectors of an image's half end with a
// pixel, so no other channels follow.
bool expect_filters(int64_t rows, int64_t columns, int64_t made, int64_t summed) {
  TORCH_CHECK(rows == columns && (rows == 3 || rows == 4), "winograd: filters are 3 x 3 or 4 x 4, not ", rows, " x ",
              columns);
  TORCH_CHECK(rows == 3 || (made % kLanes == 0 && summed % kLanes == 0),
              "winograd: filters of 4 x 4 take multiples of ", kLanes, " channels, not ", summed, " and ", made);
  return rows == 4;
}

void expect_bias(const std::optional<at::Tensor>& bias, int64_t made) {
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->numel() == made),
              "winograd: a bias is a number in float32 for each of ", made, " channels");
}

at::Tensor image_like(const at::Tensor& x, int64_t channels, int64_t height, int64_t width) {
  TORCH_CHECK(height > 0 && width > 0, "winograd: ", x.sizes(), " is no image for these filters");
  return at::empty({x.size(0), channels, height, width}, x.options(), at::MemoryFormat::ChannelsLast);
}

void expect_size(const at::Tensor& x, bool strided) {
  TORCH_CHECK(!strided || std::min(x.size(2), x.size(3)) >= 2, "winograd: ", x.sizes(), " has no second half");
}

at::Tensor winograd_convolution(const at::Tensor& image, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, at::IntArrayRef padding) {
  expect(image, weight, padding, "winograd_convolution");
  const Filters w = filters_of(weight);
  const bool strided = expect_filters(weight.size(2), weight.size(3), w.made, w.summed);
  expect_bias(bias, w.made);
  TORCH_CHECK(image.size(1) == w.summed, "winograd: ", image.sizes(), " is no image for these filters");
  const auto x = to_channels_last(image);
  expect_size(x, strided);
  const auto made = [&](int64_t size, int64_t pad) { return (size + 2 * pad - 2) / (strided ? 2 : 1); };
  auto y = image_like(x, w.made, made(x.size(2), padding[0]), made(x.size(3), padding[1]));
  if (!y.numel()) return y;
  keep_width();
  std::vector<Source> sources;
  std::vector<Filters> filters;
  if (!strided) sources.push_back({image_of(x), padding[0], padding[1]}), filters.push_back(w);
  else
    for_halves(padding, [&](const Half& rows, const Half& columns) {
      sources.push_back({image_of(x).half(rows.first, columns.first), rows.padding, columns.padding});
      filters.push_back(half(w, rows, columns));
    });
  convolve(sources, filters, image_of(y), bias, kernels(strided), x.options());
  return y;
}

at::Tensor winograd_input_gradient(const at::Tensor& gradient, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias, at::IntArrayRef padding) {
  expect(gradient, weight, padding, "winograd_input_gradient");
  const Filters w = filters_of(weight);
  const bool strided = expect_filters(weight.size(2), weight.size(3), w.made, w.summed);
  expect_bias(bias, w.summed);
  TORCH_CHECK(gradient.size(1) == w.made, "winograd: ", gradient.sizes(), " is no image for these filters");
  const auto dy = to_channels_last(gradient);
  const auto read = [&](int64_t size, int64_t pad) { return strided ? 2 * size + 2 - 2 * pad : size + 2 - 2 * pad; };
  auto dx = image_like(dy, w.summed, read(dy.size(2), padding[0]), read(dy.size(3), padding[1]));
  if (!dx.numel()) return dx;
  keep_width();
  const auto& kernel = kernels(strided);
  if (!strided) {
    convolve({{image_of(dy), 2 - padding[0], 2 - padding[1]}}, {turned(w, 3)}, image_of(dx), bias, kernel,
             dy.options());
    return dx;
  }
  for_halves(padding, [&](const Half& rows, const Half& columns) {
    convolve({{image_of(dy), 1 - rows.padding, 1 - columns.padding}}, {turned(half(w, rows, columns), 2)},
             image_of(dx).half(rows.first, columns.first), bias, kernel, dy.options());
  });
  return dx;
}

at::Tensor winograd_weight_gradient(const at::Tensor& gradient, const at::Tensor& input, at::IntArrayRef padding,
                                    int64_t taps, bool channels_last) {
  expect(gradient, input, padding, "winograd_weight_gradient");
  const auto x = to_channels_last(input), dy = to_channels_last(gradient);
  const bool strided = expect_filters(taps, taps, dy.size(1), x.size(1));
  expect_size(x, strided);
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t room = x.size(2 + i) + 2 * padding[i] - taps;
    TORCH_CHECK(room >= 0 && dy.size(2 + i) == (strided ? room / 2 : room) + 1 && dy.size(0) == x.size(0),
                "winograd: ", dy.sizes(), " is no gradient of a convolution of ", x.sizes());
  }
  auto made = at::empty({dy.size(1), x.size(1), taps, taps}, x.options(),
                        channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
  if (!x.numel()) return made.zero_();
  keep_width();
  const auto& kernel = kernels(strided);
  const auto s = made.strides();
  float* to = made.mutable_data_ptr<float>();
  if (!strided) {
    sum_products({image_of(x), padding[0], padding[1]}, image_of(dy), to, s, kernel, x.options());
    return made;
  }
  for_halves(padding, [&](const Half& rows, const Half& columns) {
    const std::array<int64_t, 4> strides{s[0], s[1], 2 * s[2], 2 * s[3]};
    sum_products({image_of(x).half(rows.first, columns.first), rows.padding, columns.padding}, image_of(dy),
                 to + rows.parity * s[2] + columns.parity * s[3], strides, kernel, x.options());
  });
  return made;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hocket, library) {
  library.def("winograd_convolution(Tensor x, Tensor weight, Tensor? bias, int[] padding) -> Tensor");
  library.def("winograd_input_gradient(Tensor gradient, Tensor weight, Tensor? bias, int[] padding) -> Tensor");
  library.def(
      "winograd_weight_gradient(Tensor gradient, Tensor input, int[] padding, int taps, bool channels_last) -> Tensor");
}

TORCH_LIBRARY_IMPL(hocket, CPU, library) {
  library.impl("winograd_convolution", winograd_convolution);
  library.impl("winograd_input_gradient", winograd_input_gradient);
  library.impl("winograd_weight_gradient", winograd_weight_gradient);
}
