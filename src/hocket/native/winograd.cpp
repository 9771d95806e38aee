// Convolutions of 3 x 3 with stride 1 by Winograd's algorithm, and their gradients, for float32 images that have their
// channels last. They round otherwise than torch's, not more.
//
// A block of tiles is taken through all steps while it lies in the second-level cache. Of the gradient of the filters
// each part (of some channels of both images) is summed up there over all tiles; where there are few parts, threads
// share the tiles.

#include "widths.h"
#include "winograd.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace {

using namespace hocket::winograd;

constexpr int64_t kMinChannels = 8;         // a vector that begins in a pixel ends in the next one
constexpr int64_t kBlockValues = 48 << 10;  // of V: with M a third of a cache of a MiB
constexpr int64_t kMaxVectors = 2;          // of a panel
constexpr int64_t kPartSums = 64 * 64;      // for each place: they fill a quarter of that cache
constexpr int64_t kGrainSums = 16 << 10;    // for one thread at least

// How many rows and vectors of results a product has in registers.
struct Wide {
  static constexpr int kTiles = 14, kVectors = kMaxVectors, kChannels = 8;
};
struct Narrow {
  static constexpr int kTiles = 6, kVectors = 1, kChannels = 4;
};

// Filters as they are read: strides of the channels that they make, of those that they sum over, and of their rows and
// columns.
struct Filters {
  const float* data;
  int64_t made, summed, made_stride, summed_stride, row_stride, column_stride;
};

// A part of the gradient of the filters: of these channels of the input and of the result.
struct Part {
  int64_t c, rows, k, columns;
  int64_t stride() const { return padded(columns); }
};

// The memory of one thread: a block of tiles of one image, and of a panel of the other.
struct Scratch {
  int64_t tiles, stride, border;

  Scratch(int64_t channels, int64_t most_channels, int64_t unit) {
    stride = padded(channels);
    if (stride % 256 == 0) stride += kLanes;  // or rows would share a few sets of the first-level cache
    tiles = std::clamp<int64_t>(kBlockValues / (kPlaces * stride) / unit, 2, 16) * unit;
    border = Border::size(most_channels);
  }
  int64_t size() const { return block_size(stride) + block_size(kMaxVectors * kLanes) + 2 * border; }
  Block v(float* memory) const { return {memory, stride, tiles * stride + kLanes}; }
  Block m(float* memory) const {
    const int64_t width = kMaxVectors * kLanes;
    return {memory + block_size(stride), width, tiles * width + kLanes};
  }
  float* edges(float* memory) const { return memory + size() - 2 * border; }

 private:
  int64_t block_size(int64_t width) const { return kPlaces * (tiles * width + kLanes); }
};

// A convolution as one thread sees it.
struct Convolution {
  Image x, y;
  int64_t pad_y, pad_x;
  Scratch scratch;
  int64_t num_tiles() const { return x.images * ((y.height + 1) / 2) * ((y.width + 1) / 2); }
};

// Of the channels that are made, panels of one or more vectors. The last one may begin with channels of the one before,
// so that it ends with the last channel.
template <typename Unit>
std::vector<Panel> panels_of(int64_t channels) {
  std::vector<Panel> panels;
  for (int64_t k = 0; k < channels; k += panels.back().count * kLanes) {
    const int64_t count = channels - k > kLanes && channels >= Unit::kVectors * kLanes ? Unit::kVectors : 1;
    panels.push_back({std::clamp<int64_t>(channels - count * kLanes, 0, k), count});
  }
  return panels;
}

// U of a panel, as [place][channel that is summed over][channel that is made].
HOCKET_INLINE void pack(const Filters& w, Panel panel, float* to) {
  const int64_t width = panel.count * kLanes;
  for (int64_t r = 0; r < w.summed; ++r)
    for (int64_t first = 0; first < width; first += kLanes) {
      float lanes[9][kLanes] = {};
      for (int64_t l = 0; l < std::min(kLanes, w.made - panel.first - first); ++l) {
        const float* from = w.data + (panel.first + first + l) * w.made_stride + r * w.summed_stride;
        for (int64_t i = 0; i < 9; ++i) lanes[i][l] = from[i / 3 * w.row_stride + i % 3 * w.column_stride];
      }
      Vector g[9];
      for (int i = 0; i < 9; ++i) g[i] = load(lanes[i]);
      transform_filter(g, to + r * width + first, w.summed * width);
    }
}

// The results of the tiles [first, last); `filters`: U of each panel.
template <typename Unit>
HOCKET_INLINE void convolve(const Convolution& c, const std::vector<Panel>& panels, const float* filters,
                            const float* bias, float* memory, int64_t first, int64_t last) {
  const Block v = c.scratch.v(memory), m = c.scratch.m(memory);
  const Border border(c.x, c.scratch.edges(memory));
  for (int64_t from = first; from < last; from += c.scratch.tiles) {
    const int64_t count = std::min(last - from, c.scratch.tiles), channels = c.x.channels;
    transform_input(c.x, border, Tile(c.y, from), c.pad_y, c.pad_x, count, {0, padded(channels) / kLanes}, v);
    const float* u = filters;
    for (const Panel panel : panels) {
      const int64_t width = panel.count * kLanes;
      for (int64_t place = 0; place < kPlaces; ++place, u += channels * width)
        for (int64_t t = 0; t < count; t += Unit::kTiles) {
          const Rows rows{v.at(place, t), v.tile_stride, 1};
          multiply_panel<Unit::kTiles, Unit::kVectors, false>(panel, rows, u, width, channels, m.at(place, t),
                                                              m.tile_stride);
        }
      transform_output(m, Tile(c.y, from), count, panel, bias, c.y);
    }
  }
}

// dU of a part, from the tiles [first, last), as [place][channel of the input][channel of the result].
template <typename Unit>
HOCKET_INLINE void sum_products(const Convolution& c, const Part& part, float* memory, int64_t first, int64_t last,
                                float* sums) {
  const Block v = c.scratch.v(memory), m = c.scratch.m(memory);
  float* edges = c.scratch.edges(memory);
  const Border x_border(c.x, edges), y_border(c.y, edges + c.scratch.border);
  const int64_t rows = padded(part.rows), columns = part.stride();
  std::memset(sums, 0, kPlaces * rows * columns * sizeof(float));
  for (int64_t from = first; from < last; from += c.scratch.tiles) {
    const int64_t count = std::min(last - from, c.scratch.tiles);
    transform_input(c.x, x_border, Tile(c.y, from), c.pad_y, c.pad_x, count, {part.c, rows / kLanes}, v);
    for (int64_t k = 0; k < columns;) {
      const Panel panel{part.k + k, columns - k > kLanes ? Unit::kVectors : 1};
      transform_gradient(c.y, y_border, Tile(c.y, from), count, panel, m);
      for (int64_t place = 0; place < kPlaces; ++place)
        for (int64_t r = 0; r < rows; r += Unit::kChannels) {
          const Rows channels{v.at(place, 0) + r, 1, v.tile_stride};
          multiply_panel<Unit::kChannels, Unit::kVectors, true>(panel, channels, m.at(place, 0), m.tile_stride, count,
                                                                sums + (place * rows + r) * columns + k, columns);
        }
      k += panel.count * kLanes;
    }
  }
}

// The gradient of a part's filters, from `count` sums of products, `stride` apart.
void finish(const Part& part, const float* sums, int64_t stride, int64_t count, const at::Tensor& gradient) {
  float* to = gradient.mutable_data_ptr<float>();
  const auto s = gradient.strides();
  const int64_t rows = padded(part.rows), columns = part.stride();
  for (int64_t c = 0; c < part.rows; ++c)
    for (int64_t k = 0; k < part.columns; k += kLanes) {
      const auto read = [&](int place) {
        const float* from = sums + (place * rows + c) * columns + k;
        Vector sum = load(from);
        for (int64_t i = 1; i < count; ++i) sum += load(from + i * stride);
        return sum;
      };
      Vector g[9];
      transform_filter_gradient(read, g);
      for (int64_t l = 0; l < std::min(kLanes, part.columns - k); ++l)
        for (int64_t i = 0; i < 9; ++i)
          to[(part.k + k + l) * s[0] + (part.c + c) * s[1] + i / 3 * s[2] + i % 3 * s[3]] = g[i][l];
    }
}

// The kernels for a kind of vector units.
struct Kernels {
  int64_t tiles;
  std::vector<Panel> (*panels)(int64_t);
  void (*pack)(const Filters&, Panel, float*);
  void (*convolve)(const Convolution&, const std::vector<Panel>&, const float*, const float*, float*, int64_t, int64_t);
  void (*sum_products)(const Convolution&, const Part&, float*, int64_t, int64_t, float*);
};

#define HOCKET_KERNELS(NAME, UNIT, ...)                                                                             \
  __VA_ARGS__ void pack_##NAME(const Filters& w, Panel panel, float* to) { pack(w, panel, to); }                    \
  __VA_ARGS__ void convolve_##NAME(const Convolution& c, const std::vector<Panel>& panels, const float* filters,    \
                                   const float* bias, float* memory, int64_t first, int64_t last) {                 \
    convolve<UNIT>(c, panels, filters, bias, memory, first, last);                                                  \
  }                                                                                                                 \
  __VA_ARGS__ void sum_products_##NAME(const Convolution& c, const Part& part, float* memory, int64_t first,        \
                                       int64_t last, float* sums) {                                                 \
    sum_products<UNIT>(c, part, memory, first, last, sums);                                                         \
  }                                                                                                                 \
  const Kernels k##NAME{UNIT::kTiles, panels_of<UNIT>, pack_##NAME, convolve_##NAME, sum_products_##NAME};

HOCKET_KERNELS(Any, Narrow)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
HOCKET_KERNELS(Avx2, Narrow, __attribute__((optimize("O3"), target("avx2,fma"))))
HOCKET_KERNELS(Avx512, Wide, __attribute__((optimize("O3"), target("avx2,fma,avx512f,prefer-vector-width=512"))))

const Kernels& kernels() {
  static const Kernels& found = __builtin_cpu_supports("avx512f")                                  ? kAvx512
                                : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kAvx2
                                                                                                   : kAny;
  return found;
}
#else
const Kernels& kernels() { return kAny; }
#endif
#undef HOCKET_KERNELS

at::Tensor last(const at::Tensor& image) { return image.contiguous(at::MemoryFormat::ChannelsLast); }

// Kernels only read where an image is given.
Image image_of(const at::Tensor& x) {
  return {const_cast<float*>(x.const_data_ptr<float>()), x.size(0), x.size(2), x.size(3), x.size(1)};
}

void expect(const at::Tensor& image, const at::Tensor& other, at::IntArrayRef padding, const char* who) {
  for (const auto& each : {image, other})
    TORCH_CHECK(each.dim() == 4 && each.scalar_type() == at::kFloat && each.size(1) >= kMinChannels, who,
                ": four dimensions, float32, and at least ", kMinChannels, " channels are needed, not ", each.sizes());
  TORCH_CHECK(padding.size() == 2 && std::min(padding[0], padding[1]) >= 0 && std::max(padding[0], padding[1]) <= 2, who,
              ": there is padding by 0, 1 and 2, not ", padding);
}

at::Tensor convolved(const at::Tensor& image, const Filters& w, const std::optional<at::Tensor>& bias, int64_t pad_y,
                     int64_t pad_x) {
  const auto given = last(image);
  const int64_t height = image.size(2) + 2 * pad_y - 2, width = image.size(3) + 2 * pad_x - 2;
  TORCH_CHECK(height > 0 && width > 0 && image.size(1) == w.summed, "winograd: ", image.sizes(),
              " is no image for these filters");
  auto made = at::empty({image.size(0), w.made, height, width}, given.options(), at::MemoryFormat::ChannelsLast);
  if (!made.numel()) return made;
  hocket::keep_width();
  const auto& kernel = kernels();
  const auto panels = kernel.panels(w.made);
  const Convolution c{image_of(given), image_of(made), pad_y, pad_x, Scratch(w.summed, w.summed, kernel.tiles)};
  const int64_t threads = std::max(1, at::get_num_threads()), size = c.scratch.size(), tiles = c.num_tiles();
  std::vector<int64_t> starts{padded(w.made)};
  for (const Panel panel : panels) starts.push_back(starts.back() + kPlaces * w.summed * panel.count * kLanes);
  auto memory = at::empty({starts.back() + threads * size}, given.options());
  float *biases = memory.mutable_data_ptr<float>(), *own = biases + starts.back();
  if (bias) std::memcpy(biases, bias->contiguous().const_data_ptr<float>(), w.made * sizeof(float));
  const int64_t grain = std::max<int64_t>(1, kGrainSums / (kLanes * w.summed));
  at::parallel_for(0, panels.size(), grain, [&](int64_t from, int64_t to) {
    for (int64_t p = from; p < to; ++p) kernel.pack(w, panels[p], biases + starts[p]);
  });
  const int64_t units = (tiles + kernel.tiles - 1) / kernel.tiles;
  at::parallel_for(0, units, 1, [&](int64_t from, int64_t to) {
    kernel.convolve(c, panels, biases + starts[0], bias ? biases : nullptr, own + at::get_thread_num() * size,
                    from * kernel.tiles, std::min(tiles, to * kernel.tiles));
  });
  return made;
}

void expect_filters(const at::Tensor& weight) {
  TORCH_CHECK(weight.size(2) == 3 && weight.size(3) == 3, "winograd: filters are 3 x 3, not ", weight.sizes());
}

at::Tensor winograd_convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                at::IntArrayRef padding) {
  expect(x, weight, padding, "winograd_convolution");
  expect_filters(weight);
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->numel() == weight.size(0)),
              "winograd: a bias is a number in float32 for each of ", weight.size(0), " channels");
  const auto s = weight.strides();
  return convolved(x, {weight.const_data_ptr<float>(), weight.size(0), weight.size(1), s[0], s[1], s[2], s[3]}, bias,
                   padding[0], padding[1]);
}

// Of the input: the gradient convolved with the filters turned by half a turn.
at::Tensor winograd_input_gradient(const at::Tensor& gradient, const at::Tensor& weight, at::IntArrayRef padding) {
  expect(gradient, weight, padding, "winograd_input_gradient");
  expect_filters(weight);
  const auto s = weight.strides();
  const float* corner = weight.const_data_ptr<float>() + 2 * s[2] + 2 * s[3];
  return convolved(gradient, {corner, weight.size(1), weight.size(0), s[1], s[0], -s[2], -s[3]}, std::nullopt,
                   2 - padding[0], 2 - padding[1]);
}

at::Tensor winograd_weight_gradient(const at::Tensor& gradient, const at::Tensor& input, at::IntArrayRef padding,
                                    bool channels_last) {
  expect(gradient, input, padding, "winograd_weight_gradient");
  const auto x = last(input), dy = last(gradient);
  const int64_t channels = x.size(1), made_channels = dy.size(1);
  for (int64_t i = 0; i < 2; ++i)
    TORCH_CHECK(dy.size(2 + i) == x.size(2 + i) + 2 * padding[i] - 2 && dy.size(0) == x.size(0),
                "winograd: ", dy.sizes(), " is no gradient of a convolution of ", x.sizes());
  auto made = at::empty({made_channels, channels, 3, 3}, x.options(),
                        channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
  if (!x.numel()) return made.zero_();
  hocket::keep_width();
  // As many vectors of channels as fit; more of one image where the other has few.
  const auto most_beside = [](int64_t others) {
    return kPartSums / padded(std::min<int64_t>(others, 64)) / kLanes * kLanes;
  };
  const int64_t rows = most_beside(made_channels), columns = most_beside(channels);
  std::vector<Part> parts;
  for (int64_t c = 0; c < channels; c += rows)
    for (int64_t k = 0; k < made_channels; k += columns)
      parts.push_back({c, std::min(rows, channels - c), k, std::min(columns, made_channels - k)});
  const auto& kernel = kernels();
  const int64_t most = std::max(channels, made_channels);
  const Convolution c{image_of(x), image_of(dy), padding[0], padding[1], Scratch(parts[0].rows, most, kernel.tiles)};
  const int64_t threads = std::max(1, at::get_num_threads()), num_parts = parts.size(), tiles = c.num_tiles();
  const int64_t splits = num_parts >= 4 * threads ? 1 : std::min(threads, tiles);
  const int64_t size = c.scratch.size(), sums_size = kPlaces * padded(parts[0].rows) * parts[0].stride();
  const int64_t num_sums = splits == 1 ? threads : splits * num_parts;
  auto memory = at::empty({threads * size + num_sums * sums_size}, x.options());
  float *own = memory.mutable_data_ptr<float>(), *sums = own + threads * size;
  at::parallel_for(0, splits * num_parts, 1, [&](int64_t from, int64_t to) {
    const int64_t thread = at::get_thread_num();
    for (int64_t item = from; item < to; ++item) {
      const int64_t split = item / num_parts, part = item % num_parts;
      float* sum = sums + (splits == 1 ? thread : part * splits + split) * sums_size;
      kernel.sum_products(c, parts[part], own + thread * size, tiles * split / splits, tiles * (split + 1) / splits,
                          sum);
      if (splits == 1) finish(parts[part], sum, 0, 1, made);
    }
  });
  if (splits > 1)
    at::parallel_for(0, num_parts, 1, [&](int64_t from, int64_t to) {
      for (int64_t part = from; part < to; ++part)
        finish(parts[part], sums + part * splits * sums_size, sums_size, splits, made);
    });
  return made;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hocket, library) {
  library.def("winograd_convolution(Tensor x, Tensor weight, Tensor? bias, int[] padding) -> Tensor");
  library.def("winograd_input_gradient(Tensor gradient, Tensor weight, int[] padding) -> Tensor");
  library.def("winograd_weight_gradient(Tensor gradient, Tensor input, int[] padding, bool channels_last) -> Tensor");
}

TORCH_LIBRARY_IMPL(hocket, CPU, library) {
  library.impl("winograd_convolution", winograd_convolution);
  library.impl("winograd_input_gradient", winograd_input_gradient);
  library.impl("winograd_weight_gradient", winograd_weight_gradient);
}
