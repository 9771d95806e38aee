// The steps of Winograd's F(2 x 2, 3 x 3) on blocks of tiles (Lavin & Gray, Fast Algorithms for Convolutional Neural
// Networks, CVPR 2016): a convolution of 3 x 3 with stride 1 takes 16 products for 2 x 2 results and a pair of
// channels, where the sum that defines it takes 36.
//
//     V = B' d B      of each tile of 4 x 4 pixels        U = G g G'     of each filter
//     M = V U         for each of the 16 places: tiles x channels times channels x channels
//     Y = A' M A      2 x 2 results                       dU = V' (A dY A'),  dg = G' dU G
//
// Images have their channels last, so a vector is 16 channels of a pixel. All functions are inlined into one that is
// compiled for a kind of vector units.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to functions that are inlined

#define HOCKET_INLINE inline __attribute__((always_inline))

namespace hocket::winograd {

constexpr int64_t kLanes = 16;   // floats in a vector: one register of AVX-512, two of AVX2
constexpr int64_t kPlaces = 16;  // in a transformed tile

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias));

HOCKET_INLINE Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
HOCKET_INLINE void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

// The first `count` values, if the vector has more.
HOCKET_INLINE void store(float* to, Vector value, int64_t count) {
  if (count >= kLanes) return store(to, value);
  float lanes[kLanes];
  store(lanes, value);
  for (int64_t l = 0; l < count; ++l) to[l] = lanes[l];
}

HOCKET_INLINE int64_t padded(int64_t channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

struct Image {
  float* data;
  int64_t images, height, width, channels;
  HOCKET_INLINE float* pixel(int64_t n, int64_t y, int64_t x) const {
    return data + ((n * height + y) * width + x) * channels;
  }
};

// Channels of a pixel, `count` vectors of them.
struct Panel {
  int64_t first, count;
};

// Where a block of transformed tiles lies: [place][tile][channel].
struct Block {
  float* data;
  int64_t tile_stride, place_stride;
  HOCKET_INLINE float* at(int64_t place, int64_t tile) const {
    return data + place * place_stride + tile * tile_stride;
  }
};

// Tiles in order: of 2 x 2 pixels of the convolution's result.
struct Tile {
  int64_t rows, columns, image, row, column;

  HOCKET_INLINE Tile(const Image& results, int64_t number)
      : rows((results.height + 1) / 2), columns((results.width + 1) / 2), image(number / (rows * columns)),
        row(number / columns % rows), column(number % columns) {}

  HOCKET_INLINE void next() {
    if (++column < columns) return;
    column = 0;
    if (++row == rows) row = 0, ++image;
  }
};

// Pixels as a transform reads them, a vector at a time. What is outside of the image is zero, and the last pixel is
// read where it was copied to: it may have fewer channels than the vectors, and nothing behind it.
struct Border {
  const float *zeros, *last, *copy;  // each as long as the channels and one vector more

  HOCKET_INLINE Border(const Image& image, float* memory)
      : zeros(memory), last(image.pixel(image.images - 1, image.height - 1, image.width - 1)),
        copy(memory + image.channels + kLanes) {
    std::memset(memory, 0, size(image.channels) * sizeof(float));
    std::memcpy(memory + image.channels + kLanes, last, image.channels * sizeof(float));
  }
  static int64_t size(int64_t channels) { return 2 * (channels + kLanes); }

  HOCKET_INLINE const float* pixel(const Image& image, int64_t n, int64_t y, int64_t x) const {
    if (y < 0 || x < 0 || y >= image.height || x >= image.width) return zeros;
    const float* found = image.pixel(n, y, x);
    return found == last ? copy : found;
  }
};

// V = B' d B of `count` vectors of a tile: `read(place, channel)` gives one of d.
template <typename Read>
HOCKET_INLINE void transform_pixels(int64_t count, const Read& read, float* to, int64_t place_stride) {
  for (int64_t c = 0; c < count * kLanes; c += kLanes) {
    Vector t[4][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Vector d0 = read(j, c), d1 = read(4 + j, c), d2 = read(8 + j, c), d3 = read(12 + j, c);
      t[0][j] = d0 - d2, t[1][j] = d1 + d2, t[2][j] = d2 - d1, t[3][j] = d1 - d3;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      float* row = to + 4 * i * place_stride + c;
      store(row, t[i][0] - t[i][2]);
      store(row + place_stride, t[i][1] + t[i][2]);
      store(row + 2 * place_stride, t[i][2] - t[i][1]);
      store(row + 3 * place_stride, t[i][1] - t[i][3]);
    }
  }
}

// V of `count` tiles, of the channels of a panel.
HOCKET_INLINE void transform_input(const Image& x, const Border& border, Tile tile, int64_t pad_y, int64_t pad_x,
                                   int64_t count, Panel panel, const Block& v) {
  for (int64_t t = 0; t < count; ++t, tile.next()) {
    const int64_t top = 2 * tile.row - pad_y, left = 2 * tile.column - pad_x;
    // Of a tile that ends before the last column the image's last pixel is none.
    if (top >= 0 && left >= 0 && top + 4 <= x.height && left + 4 < x.width) {
      const float* corner = x.pixel(tile.image, top, left) + panel.first;
      const int64_t row = x.width * x.channels, column = x.channels;
      const auto read = [=](int place, int64_t c) __attribute__((always_inline)) {
        return load(corner + (place / 4) * row + (place % 4) * column + c);
      };
      transform_pixels(panel.count, read, v.at(0, t), v.place_stride);
    } else {
      const float* pixels[kPlaces];
      for (int64_t i = 0; i < kPlaces; ++i)
        pixels[i] = border.pixel(x, tile.image, top + i / 4, left + i % 4) + panel.first;
      const auto read = [&](int place, int64_t c) __attribute__((always_inline)) { return load(pixels[place] + c); };
      transform_pixels(panel.count, read, v.at(0, t), v.place_stride);
    }
  }
}

// A dY A' of `count` tiles, of the channels of a panel.
HOCKET_INLINE void transform_gradient(const Image& y, const Border& border, Tile tile, int64_t count, Panel panel,
                                      const Block& m) {
  for (int64_t t = 0; t < count; ++t, tile.next()) {
    const float* pixels[4];
    for (int64_t i = 0; i < 4; ++i)
      pixels[i] = border.pixel(y, tile.image, 2 * tile.row + i / 2, 2 * tile.column + i % 2) + panel.first;
    for (int64_t c = 0; c < panel.count * kLanes; c += kLanes) {
      const Vector a = load(pixels[0] + c), b = load(pixels[1] + c), d = load(pixels[2] + c), e = load(pixels[3] + c);
      const Vector left[4] = {a, a + d, a - d, -d}, right[4] = {b, b + e, b - e, -e};
      float* row = m.at(0, t) + c;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i, row += 4 * m.place_stride) {
        store(row, left[i]);
        store(row + m.place_stride, left[i] + right[i]);
        store(row + 2 * m.place_stride, left[i] - right[i]);
        store(row + 3 * m.place_stride, -right[i]);
      }
    }
  }
}

// Y = A' M A of `count` tiles, of the channels of a panel, with their bias where there is one.
HOCKET_INLINE void transform_output(const Block& m, Tile tile, int64_t count, Panel panel, const float* bias,
                                    const Image& y) {
  const int64_t width = std::min(kLanes, y.channels);
  for (int64_t t = 0; t < count; ++t, tile.next()) {
    const bool below = 2 * tile.row + 1 < y.height, right = 2 * tile.column + 1 < y.width;
    float* to = y.pixel(tile.image, 2 * tile.row, 2 * tile.column) + panel.first;
    for (int64_t c = 0; c < panel.count * kLanes; c += kLanes, to += kLanes) {
      Vector r[2][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const float* column = m.at(j, t) + c;
        const Vector m0 = load(column), m1 = load(column + 4 * m.place_stride),
                     m2 = load(column + 8 * m.place_stride), m3 = load(column + 12 * m.place_stride);
        r[0][j] = m0 + m1 + m2, r[1][j] = m1 - m2 - m3;
      }
      const Vector more = bias ? load(bias + panel.first + c) : Vector{};
      store(to, r[0][0] + r[0][1] + r[0][2] + more, width);
      if (right) store(to + y.channels, r[0][1] - r[0][2] - r[0][3] + more, width);
      if (below) store(to + y.width * y.channels, r[1][0] + r[1][1] + r[1][2] + more, width);
      if (below && right) store(to + (y.width + 1) * y.channels, r[1][1] - r[1][2] - r[1][3] + more, width);
    }
  }
}

// U = G g G' of 16 filters: `g[place]` is a vector of them.
HOCKET_INLINE void transform_filter(const Vector (&g)[9], float* to, int64_t place_stride) {
  Vector t[4][3];
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j) {
    const Vector ends = g[j] + g[6 + j];
    t[0][j] = g[j], t[1][j] = 0.5f * (ends + g[3 + j]), t[2][j] = 0.5f * (ends - g[3 + j]), t[3][j] = g[6 + j];
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vector ends = t[i][0] + t[i][2];
    float* row = to + 4 * i * place_stride;
    store(row, t[i][0]);
    store(row + place_stride, 0.5f * (ends + t[i][1]));
    store(row + 2 * place_stride, 0.5f * (ends - t[i][1]));
    store(row + 3 * place_stride, t[i][2]);
  }
}

// dg = G' dU G of 16 filters: `read(place)` gives a vector of dU.
template <typename Read>
HOCKET_INLINE void transform_filter_gradient(const Read& read, Vector (&g)[9]) {
  Vector t[3][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const Vector u0 = read(j), u1 = read(4 + j), u2 = read(8 + j), u3 = read(12 + j), half = 0.5f * (u1 + u2);
    t[0][j] = u0 + half, t[1][j] = 0.5f * (u1 - u2), t[2][j] = half + u3;
  }
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    const Vector half = 0.5f * (t[i][1] + t[i][2]);
    g[3 * i] = t[i][0] + half, g[3 * i + 1] = 0.5f * (t[i][1] - t[i][2]), g[3 * i + 2] = half + t[i][3];
  }
}

// Of left[r][i] * right[i][k] the sums over i, for kRows and kVectors vectors of k, in registers. They are added to
// what is there, or put in its place: a long sum is made of short ones, which round less.
struct Rows {
  const float* data;
  int64_t row_stride, stride;
};

template <int kRows, int kVectors, bool kAdds>
HOCKET_INLINE void multiply(Rows left, const float* right, int64_t right_stride, int64_t count, float* to,
                            int64_t to_stride) {
  Vector sum[kRows][kVectors] = {};
  for (int64_t i = 0; i < count; ++i) {
    Vector factor[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) factor[k] = load(right + i * right_stride + k * kLanes);
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) sum[r][k] += left.data[r * left.row_stride + i * left.stride] * factor[k];
  }
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      float* at = to + r * to_stride + k * kLanes;
      store(at, kAdds ? load(at) + sum[r][k] : sum[r][k]);
    }
}

// The same for one vector or for kVectors of them.
template <int kRows, int kVectors, bool kAdds, typename... Operands>
HOCKET_INLINE void multiply_panel(Panel panel, Operands... operands) {
  if (panel.count == 1) multiply<kRows, 1, kAdds>(operands...);
  else multiply<kRows, kVectors, kAdds>(operands...);
}

}  // namespace hocket::winograd
