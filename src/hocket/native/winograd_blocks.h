// The part of one thread in a convolution by Winograd's algorithm, or in its gradients: each block of tiles goes through
// all steps while it is in the second-level cache.

#pragma once

#include "winograd.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hocket::winograd {

constexpr int64_t kBlockValues = 48 << 10;  // of V: with M a third of a cache of a MiB
constexpr int64_t kMaxVectors = 2;          // of a panel
constexpr int64_t kMaxParts = 4;            // of an image that is read: its halves, by rows and by columns
constexpr int64_t kPartSums = 64 * 64;      // for each place: they fill a quarter of that cache

// The type of a vector, and the rows and vectors of a product's results in registers.
struct Wide {
  using Vector = Whole;
  static constexpr int kTiles = 14, kVectors = kMaxVectors, kChannels = 8;
};
struct Narrow {
  using Vector = Pair<Half>;
  static constexpr int kTiles = 6, kVectors = 1, kChannels = 4;
};
struct Other {
  using Vector = Pair<Pair<Quarter>>;
  static constexpr int kTiles = 2, kVectors = 1, kChannels = 2;
};

// Filters in memory: the strides of their output channels, of their input channels, and of rows and columns.
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
  int64_t places, tiles, stride, border;

  Scratch(int64_t places, int64_t channels, int64_t most_channels, int64_t unit) : places(places) {
    stride = padded(channels);
    if (stride % 256 == 0) stride += kLanes;  // or rows would share a few sets of the first-level cache
    tiles = std::clamp<int64_t>(kBlockValues / (places * stride) / unit, 2, 16) * unit;
    border = Border::size(most_channels);
  }
  int64_t size() const { return block_size(stride) + block_size(kMaxVectors * kLanes) + kMaxParts * border; }
  Block v(float* memory) const { return {memory, stride, tiles * stride + kLanes}; }
  Block m(float* memory) const {
    const int64_t width = kMaxVectors * kLanes;
    return {memory + block_size(stride), width, tiles * width + kLanes};
  }
  float* edge(float* memory, int64_t n) const { return memory + size() - (n + 1) * border; }

 private:
  int64_t block_size(int64_t width) const { return places * (tiles * width + kLanes); }
};

// An input of a convolution: an image, with the padding before it.
struct Source {
  Image x;
  int64_t pad_y, pad_x;
};

// A convolution as one thread sees it: of one image, or of the four halves of one, channel behind channel.
struct Convolution {
  std::vector<Source> sources;
  Image y;
  Scratch scratch;
  int64_t num_tiles() const { return y.images * ((y.height + 1) / 2) * ((y.width + 1) / 2); }
  int64_t channels() const { return sources.size() * sources[0].x.channels; }
};

// Panels of one or more vectors of output channels. The last one may overlap the one before it, so that it ends with the
// last channel.
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
template <typename Scheme>
HOCKET_INLINE void pack(const std::vector<Filters>& filters, Panel panel, float* to) {
  using Vector = typename Scheme::Vector;
  constexpr int kTaps = Scheme::kTaps;
  const int64_t width = panel.count * kLanes, place_stride = filters.size() * filters[0].summed * width;
  for (const Filters& w : filters)
    for (int64_t r = 0; r < w.summed; ++r, to += width)
      for (int64_t first = 0; first < width; first += kLanes) {
        float lanes[kTaps][kTaps][kLanes] = {};
        for (int64_t l = 0; l < std::min(kLanes, w.made - panel.first - first); ++l) {
          const float* from = w.data + (panel.first + first + l) * w.made_stride + r * w.summed_stride;
          for (int64_t i = 0; i < kTaps; ++i)
            for (int64_t j = 0; j < kTaps; ++j) lanes[i][j][l] = from[i * w.row_stride + j * w.column_stride];
        }
        Vector g[kTaps][kTaps];
        for (int i = 0; i < kTaps * kTaps; ++i) g[i / kTaps][i % kTaps] = load<Vector>(lanes[i / kTaps][i % kTaps]);
        transform_filter<Scheme>(g, to + first, place_stride);
      }
}

// The results of the tiles [first, last); `filters`: U of each panel.
template <typename Unit, typename Scheme>
HOCKET_INLINE void convolve(const Convolution& c, const std::vector<Panel>& panels, const float* filters,
                            const float* bias, float* memory, int64_t first, int64_t last) {
  const Block v = c.scratch.v(memory), m = c.scratch.m(memory);
  std::vector<Border> borders;
  for (const Source& source : c.sources) borders.emplace_back(source.x, c.scratch.edge(memory, borders.size()));
  const int64_t each = c.sources[0].x.channels, channels = c.channels();
  for (int64_t from = first; from < last; from += c.scratch.tiles) {
    const int64_t count = std::min(last - from, c.scratch.tiles);
    Block into = v;
    for (size_t n = 0; n < borders.size(); ++n, into.data += each) {
      const Source& s = c.sources[n];
      transform_input<Scheme>(s.x, borders[n], Tile(c.y, from), s.pad_y, s.pad_x, count, {0, padded(each) / kLanes},
                              into);
    }
    const float* u = filters;
    for (const Panel panel : panels) {
      const int64_t width = panel.count * kLanes;
      for (int64_t place = 0; place < Scheme::kPlaces; ++place, u += channels * width)
        for (int64_t t = 0; t < count; t += Unit::kTiles) {
          const Rows rows{v.at(place, t), v.tile_stride, 1};
          multiply_panel<typename Unit::Vector, Unit::kTiles, Unit::kVectors, false>(panel, rows, u, width, channels, m.at(place, t),
                                                              m.tile_stride);
        }
      transform_output<Scheme>(m, Tile(c.y, from), count, panel, bias, c.y);
    }
  }
}

// dU of a part, from the tiles [first, last), as [place][channel of the input][channel of the result].
template <typename Unit, typename Scheme>
HOCKET_INLINE void sum_products(const Convolution& c, const Part& part, float* memory, int64_t first, int64_t last,
                                float* sums) {
  const Block v = c.scratch.v(memory), m = c.scratch.m(memory);
  const auto& [x, pad_y, pad_x] = c.sources[0];
  const Border x_border(x, c.scratch.edge(memory, 0)), y_border(c.y, c.scratch.edge(memory, 1));
  const int64_t rows = padded(part.rows), columns = part.stride();
  std::memset(sums, 0, Scheme::kPlaces * rows * columns * sizeof(float));
  for (int64_t from = first; from < last; from += c.scratch.tiles) {
    const int64_t count = std::min(last - from, c.scratch.tiles);
    transform_input<Scheme>(x, x_border, Tile(c.y, from), pad_y, pad_x, count, {part.c, rows / kLanes}, v);
    for (int64_t k = 0; k < columns;) {
      const Panel panel{part.k + k, columns - k > kLanes ? Unit::kVectors : 1};
      transform_gradient<Scheme>(c.y, y_border, Tile(c.y, from), count, panel, m);
      for (int64_t place = 0; place < Scheme::kPlaces; ++place)
        for (int64_t r = 0; r < rows; r += Unit::kChannels) {
          const Rows channels{v.at(place, 0) + r, 1, v.tile_stride};
          multiply_panel<typename Unit::Vector, Unit::kChannels, Unit::kVectors, true>(panel, channels, m.at(place, 0), m.tile_stride, count,
                                                                sums + (place * rows + r) * columns + k, columns);
        }
      k += panel.count * kLanes;
    }
  }
}

// The gradient of a part's filters, from `count` sums of products, `stride` apart.
template <typename Scheme>
void finish(const Part& part, const float* sums, int64_t stride, int64_t count, float* to, at::IntArrayRef s) {
  using Vector = typename Scheme::Vector;
  constexpr int kTaps = Scheme::kTaps;
  const int64_t rows = padded(part.rows), columns = part.stride();
  for (int64_t c = 0; c < part.rows; ++c)
    for (int64_t k = 0; k < part.columns; k += kLanes) {
      const auto read = [&](int place) {
        const float* from = sums + (place * rows + c) * columns + k;
        Vector sum = load<Vector>(from);
        for (int64_t i = 1; i < count; ++i) sum += load<Vector>(from + i * stride);
        return sum;
      };
      Vector g[kTaps][kTaps];
      transform_filter_gradient<Scheme>(read, g);
      for (int64_t i = 0; i < kTaps; ++i)
        for (int64_t j = 0; j < kTaps; ++j) {
          float lanes[kLanes], *into = to + (part.k + k) * s[0] + (part.c + c) * s[1] + i * s[2] + j * s[3];
          store(lanes, g[i][j]);
          for (int64_t l = 0; l < std::min(kLanes, part.columns - k); ++l) into[l * s[0]] = lanes[l];
        }
    }
}

}  // namespace hocket::winograd
