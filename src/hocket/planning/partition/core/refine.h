// Improving a partition move by move: Fiduccia-Mattheyses for the cut, annealing for every objective.

#pragma once

#include <chrono>
#include <cmath>
#include <queue>
#include <random>
#include <vector>

#include "state.h"

namespace hocket::partition {

using Random = std::mt19937_64;
using Clock = std::chrono::steady_clock;

inline double unit(Random& random) { return static_cast<double>(random() >> 11) * 0x1.0p-53; }
inline int below(Random& random, int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); }

// Nets with more pins are skipped: their gain changes only if they are almost whole or almost cut.
constexpr int kLargeNet = 256;

// Make moves in the order of their gain, each node once and also with a negative gain, then return to the best state
// (C. M. Fiduccia, R. M. Mattheyses: A linear-time heuristic for improving network partitions, DAC 1982). `slack` is the
// amount by which a part may exceed its limits meanwhile.
class FiducciaMattheyses {
 public:
  FiducciaMattheyses(const Hypergraph& graph, const Limits& limits, State& state, Random& random, Clock::time_point end)
      : graph_(graph), limits_(limits), state_(state), random_(random), end_(end), stamp_(graph.n), locked_(graph.n) {}

  bool pass(double slack) {
    std::fill(locked_.begin(), locked_.end(), 0);
    queue_ = {};
    for (int v = 0; v < graph_.n; ++v) push(v);
    std::vector<std::pair<int, int>> moved;  // node, where it was
    const Score start = state_.score();
    Score best = start;
    size_t keep = 0;
    const size_t patience = 100 + static_cast<size_t>(graph_.n) / 20;
    while (!queue_.empty() && moved.size() < keep + patience) {
      const Entry top = queue_.top();
      queue_.pop();
      if (locked_[top.node] || stamp_[top.node] != top.stamp) continue;
      const int v = top.node, from = state_.part(v);
      const double worse = state_.violation_after(v, top.to);
      if (worse > 1e-12 && state_.violation() + worse > slack) continue;
      state_.move(v, top.to);
      if (limits_.acyclic && !state_.acyclic()) {
        state_.move(v, from);
        continue;
      }
      moved_on(v, from, top.to);
      moved.emplace_back(v, from);
      const Score now{state_.violation(), state_.cost()};
      if (now < best) best = now, keep = moved.size();
      if ((moved.size() & 255) == 0 && Clock::now() > end_) break;
    }
    while (moved.size() > keep) {
      state_.move(moved.back().first, moved.back().second);
      moved.pop_back();
    }
    return best < start;
  }

 private:
  struct Entry {
    double gain;
    uint32_t noise;
    int node, to;
    uint32_t stamp;
    bool operator<(const Entry& other) const { return gain != other.gain ? gain < other.gain : noise < other.noise; }
  };

  void push(int v) {
    const int from = state_.part(v);
    ++stamp_[v];
    near_.assign(limits_.k, 0);
    bool inner = true;
    double stays = 0, all = 0;
    for (int i = graph_.xnets[v]; i < graph_.xnets[v + 1]; ++i) {
      const int e = graph_.nets[i];
      all += graph_.cost[e];
      if (state_.touching(e, from) == 1) stays += graph_.cost[e];
      if (state_.spread(e) == 1) continue;
      inner = false;
      for (int p = 0; p < limits_.k; ++p)
        if (state_.touching(e, p)) near_[p] += graph_.cost[e];
    }
    const bool over = state_.weight(from) > limits_.high[from];
    if (inner && !over && graph_.xnets[v] != graph_.xnets[v + 1]) return;
    int to = -1;
    double gain = 0;
    for (int p = 0; p < limits_.k; ++p) {
      if (p == from || (near_[p] == 0 && !inner && !over)) continue;
      const double gained = stays - (all - near_[p]);
      const bool fits = state_.violation_after(v, p) <= 1e-12;
      const bool fitted = to >= 0 && state_.violation_after(v, to) <= 1e-12;
      if (to < 0 || (fits && !fitted) || (fits == fitted && gained > gain)) to = p, gain = gained;
    }
    if (to >= 0) queue_.push({gain, static_cast<uint32_t>(random_()), v, to, stamp_[v]});
  }

  void moved_on(int v, int from, int to) {
    locked_[v] = 1;
    for (int i = graph_.xnets[v]; i < graph_.xnets[v + 1]; ++i) {
      const int e = graph_.nets[i];
      if (graph_.size(e) > kLargeNet || (state_.touching(e, from) > 1 && state_.touching(e, to) > 2)) continue;
      for (int j = graph_.xpins[e]; j < graph_.xpins[e + 1]; ++j)
        if (!locked_[graph_.pins[j]]) push(graph_.pins[j]);
    }
  }

  const Hypergraph& graph_;
  const Limits& limits_;
  State& state_;
  Random& random_;
  Clock::time_point end_;
  std::vector<uint32_t> stamp_;
  std::vector<char> locked_;
  std::vector<double> near_;
  std::priority_queue<Entry> queue_;
};

// Random moves, and exchanges of two nodes; a worse one with a probability that falls (S. Kirkpatrick et al.,
// Optimization by simulated annealing, Science 1983). It ends in the best state that was met.
inline void anneal(const Hypergraph& graph, const Limits& limits, State& state, Random& random, long steps,
                   double heat, Clock::time_point end) {
  if (graph.n < 2 || limits.k < 2) return;
  double price = 0;  // of leaving the limits by everything: more than every cut
  for (const double cost : graph.cost) price += cost;
  for (int v = 0; v < graph.n; ++v) price += graph.time[static_cast<size_t>(v) * graph.k];
  price = 20 * price + 1e-9;
  const double scale = std::max(state.smooth_cost(), 1e-12);
  // Paths between acyclic partitions lead over cyclic ones: a cycle is expensive, but not forbidden.
  const auto total = [&] {
    return state.smooth_cost() + price * state.violation() + (limits.acyclic && !state.acyclic() ? 0.1 * scale : 0);
  };
  double now = total();
  Score best = state.score();
  std::vector<int> kept = state.part();
  const auto pick = [&](int v) {
    const int degree = graph.xnets[v + 1] - graph.xnets[v];
    if (degree > 0 && random() % 8 != 0) {
      const int e = graph.nets[graph.xnets[v] + below(random, degree)];
      return state.part(graph.pins[graph.xpins[e] + below(random, graph.size(e))]);
    }
    return below(random, limits.k);
  };
  const double hot = heat * scale, cold = hot * 1e-4;
  for (long step = 0; step < steps; ++step) {
    if ((step & 1023) == 0 && Clock::now() > end) break;
    const double temperature = hot * std::pow(cold / hot, static_cast<double>(step) / static_cast<double>(steps));
    const int v = below(random, graph.n), from = state.part(v), to = pick(v);
    if (to == from) continue;
    int other = -1;
    state.move(v, to);
    if (random() % 4 == 0) {
      other = below(random, graph.n);
      if (state.part(other) != to || other == v) other = -1;
      if (other >= 0) state.move(other, from);
    }
    const double then = total();
    if (then <= now || unit(random) < std::exp((now - then) / temperature)) {
      now = then;
      const Score score = state.score();
      if (score < best) best = score, kept = state.part();
    } else {
      if (other >= 0) state.move(other, to);
      state.move(v, from);
    }
  }
  for (int v = 0; v < graph.n; ++v) state.move(v, kept[v]);
}

}  // namespace hocket::partition
