// The steps of Winograd's algorithm on blocks of tiles (Lavin & Gray, Fast Algorithms for Convolutional Neural
// Networks, CVPR 2016). A tile is 2 x 2 results of a convolution with stride 1:
//
//     V = B' d B      of each tile of pixels              U = G g G'     of each filter
//     M = V U         for each place of a tile: tiles x channels times channels x channels
//     Y = A' M A      2 x 2 results                       dU = V' (A dY A'),  dg = G' dU G
//
// Filters of 3 x 3 take 16 products for 2 x 2 results and a pair of channels, where the sum that defines them takes 36;
// filters of 2 x 2 take 9, not 16. Images have their channels last, so a vector is 16 channels of a pixel. All
// functions are inlined into one that is compiled for a kind of vector units.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to functions that are inlined

#define HOCKET_INLINE inline __attribute__((always_inline))

namespace hocket::winograd {

constexpr int64_t kLanes = 16;  // floats in a vector

// Registers of AVX-512, AVX2 and SSE. Where there are none of this size, a variable of this type lies in memory.
typedef float Whole __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Half __attribute__((vector_size(kLanes * sizeof(float) / 2)));
typedef float Quarter __attribute__((vector_size(kLanes * sizeof(float) / 4)));
template <typename T>
struct Unaligned {
  typedef T Type __attribute__((aligned(alignof(float)), may_alias));
};

// A pair of vectors, or of halves of one.
template <typename Part>
struct Pair {
  Part low, high;
  HOCKET_INLINE Pair& operator+=(const Pair& other) { return low += other.low, high += other.high, *this; }
  HOCKET_INLINE friend Pair operator+(const Pair& a, const Pair& b) { return {a.low + b.low, a.high + b.high}; }
  HOCKET_INLINE friend Pair operator-(const Pair& a, const Pair& b) { return {a.low - b.low, a.high - b.high}; }
  HOCKET_INLINE friend Pair operator-(const Pair& a) { return {-a.low, -a.high}; }
  HOCKET_INLINE friend Pair operator*(float a, const Pair& b) { return {a * b.low, a * b.high}; }
};

template <typename Vector>
struct Memory {
  HOCKET_INLINE static Vector load(const float* from) {
    return *reinterpret_cast<const typename Unaligned<Vector>::Type*>(from);
  }
  HOCKET_INLINE static void store(float* to, Vector value) {
    *reinterpret_cast<typename Unaligned<Vector>::Type*>(to) = value;
  }
};

template <typename Part>
struct Memory<Pair<Part>> {
  static constexpr int64_t kHalf = sizeof(Part) / sizeof(float);
  HOCKET_INLINE static Pair<Part> load(const float* from) {
    return {Memory<Part>::load(from), Memory<Part>::load(from + kHalf)};
  }
  HOCKET_INLINE static void store(float* to, Pair<Part> value) {
    Memory<Part>::store(to, value.low), Memory<Part>::store(to + kHalf, value.high);
  }
};

template <typename Vector>
HOCKET_INLINE Vector load(const float* from) {
  return Memory<Vector>::load(from);
}

template <typename Vector>
HOCKET_INLINE void store(float* to, Vector value) {
  Memory<Vector>::store(to, value);
}

// The first `count` values, if the vector has more.
template <typename Vector>
HOCKET_INLINE void store(float* to, Vector value, int64_t count) {
  if (count >= kLanes) return store(to, value);
  float lanes[kLanes];
  store(lanes, value);
  for (int64_t l = 0; l < count; ++l) to[l] = lanes[l];
}

HOCKET_INLINE int64_t padded(int64_t channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

// The transforms of a row or a column: F(2, 3) and F(2, 2).
template <typename V>
struct ThreeTaps {
  using Vector = V;
  static constexpr int kTaps = 3, kSide = 4, kPlaces = kSide * kSide;
  HOCKET_INLINE static void input(const Vector (&d)[4], Vector (&v)[4]) {
    v[0] = d[0] - d[2], v[1] = d[1] + d[2], v[2] = d[2] - d[1], v[3] = d[1] - d[3];
  }
  HOCKET_INLINE static void gradient(const Vector (&y)[2], Vector (&m)[4]) {
    m[0] = y[0], m[1] = y[0] + y[1], m[2] = y[0] - y[1], m[3] = -y[1];
  }
  HOCKET_INLINE static void output(const Vector (&m)[4], Vector (&y)[2]) {
    y[0] = m[0] + m[1] + m[2], y[1] = m[1] - m[2] - m[3];
  }
  HOCKET_INLINE static void filter(const Vector (&g)[3], Vector (&u)[4]) {
    const Vector ends = g[0] + g[2];
    u[0] = g[0], u[1] = 0.5f * (ends + g[1]), u[2] = 0.5f * (ends - g[1]), u[3] = g[2];
  }
  HOCKET_INLINE static void filter_gradient(const Vector (&u)[4], Vector (&g)[3]) {
    const Vector half = 0.5f * (u[1] + u[2]);
    g[0] = u[0] + half, g[1] = 0.5f * (u[1] - u[2]), g[2] = half + u[3];
  }
};

template <typename V>
struct TwoTaps {
  using Vector = V;
  static constexpr int kTaps = 2, kSide = 3, kPlaces = kSide * kSide;
  HOCKET_INLINE static void input(const Vector (&d)[3], Vector (&v)[3]) {
    v[0] = d[0] - d[1], v[1] = d[1], v[2] = d[2] - d[1];
  }
  HOCKET_INLINE static void gradient(const Vector (&y)[2], Vector (&m)[3]) {
    m[0] = y[0], m[1] = y[0] + y[1], m[2] = y[1];
  }
  HOCKET_INLINE static void output(const Vector (&m)[3], Vector (&y)[2]) { y[0] = m[0] + m[1], y[1] = m[1] + m[2]; }
  HOCKET_INLINE static void filter(const Vector (&g)[2], Vector (&u)[3]) {
    u[0] = g[0], u[1] = g[0] + g[1], u[2] = g[1];
  }
  HOCKET_INLINE static void filter_gradient(const Vector (&u)[3], Vector (&g)[2]) {
    g[0] = u[0] + u[1], g[1] = u[1] + u[2];
  }
};

struct Image {
  float* data;
  int64_t images, height, width, channels, image_stride, row_stride, pixel_stride;
  HOCKET_INLINE float* pixel(int64_t n, int64_t y, int64_t x) const {
    return data + n * image_stride + y * row_stride + x * pixel_stride;
  }
  // Every second row and column, from these.
  Image half(int64_t y, int64_t x) const {
    return {pixel(0, y, x),   images,         (height - y + 1) / 2, (width - x + 1) / 2, channels, image_stride,
            2 * row_stride, 2 * pixel_stride};
  }
};

// Channels of a pixel, `count` vectors of them.
struct Panel {
  int64_t first, count;
};

// A block of transformed tiles in memory: [place][tile][channel].
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

// V = B' d B of `count` vectors of a tile: `read(row, column, channel)` gives one of d.
template <typename Scheme, typename Read>
HOCKET_INLINE void transform_pixels(int64_t count, const Read& read, float* to, int64_t place_stride) {
  using Vector = typename Scheme::Vector;
  constexpr int kSide = Scheme::kSide;
  for (int64_t c = 0; c < count * kLanes; c += kLanes) {
    Vector t[kSide][kSide], made[kSide];
#pragma GCC unroll 4
    for (int j = 0; j < kSide; ++j) {
      Vector column[kSide];
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) column[i] = read(i, j, c);
      Scheme::input(column, made);
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) t[i][j] = made[i];
    }
#pragma GCC unroll 4
    for (int i = 0; i < kSide; ++i) {
      Scheme::input(t[i], made);
#pragma GCC unroll 4
      for (int j = 0; j < kSide; ++j) store(to + (kSide * i + j) * place_stride + c, made[j]);
    }
  }
}

// V of `count` tiles, of the channels of a panel.
template <typename Scheme>
HOCKET_INLINE void transform_input(const Image& x, const Border& border, Tile tile, int64_t pad_y, int64_t pad_x,
                                   int64_t count, Panel panel, const Block& v) {
  using Vector = typename Scheme::Vector;
  constexpr int kSide = Scheme::kSide;
  for (int64_t t = 0; t < count; ++t, tile.next()) {
    const int64_t top = 2 * tile.row - pad_y, left = 2 * tile.column - pad_x;
    // A tile that ends before the last column does not hold the image's last pixel.
    if (top >= 0 && left >= 0 && top + kSide <= x.height && left + kSide < x.width) {
      const float* corner = x.pixel(tile.image, top, left) + panel.first;
      const auto read = [=](int i, int j, int64_t c) __attribute__((always_inline)) {
        return load<Vector>(corner + i * x.row_stride + j * x.pixel_stride + c);
      };
      transform_pixels<Scheme>(panel.count, read, v.at(0, t), v.place_stride);
    } else {
      const float* pixels[kSide][kSide];
      for (int64_t i = 0; i < kSide; ++i)
        for (int64_t j = 0; j < kSide; ++j)
          pixels[i][j] = border.pixel(x, tile.image, top + i, left + j) + panel.first;
      const auto read = [&](int i, int j, int64_t c) __attribute__((always_inline)) { return load<Vector>(pixels[i][j] + c); };
      transform_pixels<Scheme>(panel.count, read, v.at(0, t), v.place_stride);
    }
  }
}

// A dY A' of `count` tiles, of the channels of a panel.
template <typename Scheme>
HOCKET_INLINE void transform_gradient(const Image& y, const Border& border, Tile tile, int64_t count, Panel panel,
                                      const Block& m) {
  using Vector = typename Scheme::Vector;
  constexpr int kSide = Scheme::kSide;
  for (int64_t t = 0; t < count; ++t, tile.next()) {
    const float* pixels[2][2];
    for (int64_t i = 0; i < 4; ++i)
      pixels[i / 2][i % 2] = border.pixel(y, tile.image, 2 * tile.row + i / 2, 2 * tile.column + i % 2) + panel.first;
    for (int64_t c = 0; c < panel.count * kLanes; c += kLanes) {
      Vector left[kSide], right[kSide], made[kSide];
      Scheme::gradient({load<Vector>(pixels[0][0] + c), load<Vector>(pixels[1][0] + c)}, left);
      Scheme::gradient({load<Vector>(pixels[0][1] + c), load<Vector>(pixels[1][1] + c)}, right);
      float* to = m.at(0, t) + c;
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) {
        Scheme::gradient({left[i], right[i]}, made);
#pragma GCC unroll 4
        for (int j = 0; j < kSide; ++j) store(to + (kSide * i + j) * m.place_stride, made[j]);
      }
    }
  }
}

// Y = A' M A of `count` tiles, of the channels of a panel, with their bias where there is one.
template <typename Scheme>
HOCKET_INLINE void transform_output(const Block& m, Tile tile, int64_t count, Panel panel, const float* bias,
                                    const Image& y) {
  using Vector = typename Scheme::Vector;
  constexpr int kSide = Scheme::kSide;
  const int64_t width = std::min(kLanes, y.channels);
  for (int64_t t = 0; t < count; ++t, tile.next()) {
    const bool below = 2 * tile.row + 1 < y.height, right = 2 * tile.column + 1 < y.width;
    float* to = y.pixel(tile.image, 2 * tile.row, 2 * tile.column) + panel.first;
    for (int64_t c = 0; c < panel.count * kLanes; c += kLanes, to += kLanes) {
      Vector rows[2][kSide], made[2];
#pragma GCC unroll 4
      for (int j = 0; j < kSide; ++j) {
        Vector column[kSide];
#pragma GCC unroll 4
        for (int i = 0; i < kSide; ++i) column[i] = load<Vector>(m.at(kSide * i + j, t) + c);
        Scheme::output(column, made);
        rows[0][j] = made[0], rows[1][j] = made[1];
      }
      const Vector more = bias ? load<Vector>(bias + panel.first + c) : Vector{};
      Scheme::output(rows[0], made);
      store(to, made[0] + more, width);
      if (right) store(to + y.pixel_stride, made[1] + more, width);
      if (!below) continue;
      Scheme::output(rows[1], made);
      store(to + y.row_stride, made[0] + more, width);
      if (right) store(to + y.row_stride + y.pixel_stride, made[1] + more, width);
    }
  }
}

// U = G g G' of 16 filters: `g[row][column]` is a vector of them.
template <typename Scheme>
HOCKET_INLINE void transform_filter(const typename Scheme::Vector (&g)[Scheme::kTaps][Scheme::kTaps], float* to, int64_t place_stride) {
  using Vector = typename Scheme::Vector;
  constexpr int kTaps = Scheme::kTaps, kSide = Scheme::kSide;
  Vector t[kSide][kTaps], made[kSide];
#pragma GCC unroll 3
  for (int j = 0; j < kTaps; ++j) {
    Vector column[kTaps];
#pragma GCC unroll 3
    for (int i = 0; i < kTaps; ++i) column[i] = g[i][j];
    Scheme::filter(column, made);
#pragma GCC unroll 4
    for (int i = 0; i < kSide; ++i) t[i][j] = made[i];
  }
#pragma GCC unroll 4
  for (int i = 0; i < kSide; ++i) {
    Scheme::filter(t[i], made);
#pragma GCC unroll 4
    for (int j = 0; j < kSide; ++j) store(to + (kSide * i + j) * place_stride, made[j]);
  }
}

// dg = G' dU G of 16 filters: `read(place)` gives a vector of dU.
template <typename Scheme, typename Read>
HOCKET_INLINE void transform_filter_gradient(const Read& read, typename Scheme::Vector (&g)[Scheme::kTaps][Scheme::kTaps]) {
  using Vector = typename Scheme::Vector;
  constexpr int kTaps = Scheme::kTaps, kSide = Scheme::kSide;
  Vector t[kTaps][kSide], made[kTaps];
#pragma GCC unroll 4
  for (int j = 0; j < kSide; ++j) {
    Vector column[kSide];
#pragma GCC unroll 4
    for (int i = 0; i < kSide; ++i) column[i] = read(kSide * i + j);
    Scheme::filter_gradient(column, made);
#pragma GCC unroll 3
    for (int i = 0; i < kTaps; ++i) t[i][j] = made[i];
  }
#pragma GCC unroll 3
  for (int i = 0; i < kTaps; ++i) Scheme::filter_gradient(t[i], g[i]);
}

// The sums over i of left[r][i] * right[i][k], for kRows and kVectors vectors of k, in registers. They replace the values
// in memory or are added to them: a long sum is made of short ones, which round less.
struct Rows {
  const float* data;
  int64_t row_stride, stride;
};

template <typename Vector, int kRows, int kVectors, bool kAdds>
HOCKET_INLINE void multiply(Rows left, const float* right, int64_t right_stride, int64_t count, float* to,
                            int64_t to_stride) {
  Vector sum[kRows][kVectors] = {};
  for (int64_t i = 0; i < count; ++i) {
    Vector factor[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) factor[k] = load<Vector>(right + i * right_stride + k * kLanes);
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
      store(at, kAdds ? load<Vector>(at) + sum[r][k] : sum[r][k]);
    }
}

// The same for one vector or for kVectors of them.
template <typename Vector, int kRows, int kVectors, bool kAdds, typename... Operands>
HOCKET_INLINE void multiply_panel(Panel panel, Operands... operands) {
  if (panel.count == 1) multiply<Vector, kRows, 1, kAdds>(operands...);
  else multiply<Vector, kRows, kVectors, kAdds>(operands...);
}

}  // namespace hocket::winograd
