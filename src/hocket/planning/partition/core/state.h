// A partition of a hypergraph with its cost, updated by each move.

#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "hypergraph.h"

namespace hocket::partition {

// The violation of limits, then the cost, compared in this order.
struct Score {
  double violation, cost;
  bool operator<(const Score& other) const {
    const double slack = 1e-9;
    if (std::abs(violation - other.violation) > slack) return violation < other.violation;
    return cost < other.cost - 1e-12 * std::abs(other.cost);
  }
};

// True if parts can be ordered so that all arcs lead forward. `between` counts arcs by phase and pair of parts.
inline bool no_cycle(const std::vector<int>& between, int k) {
  const uint64_t all = k == 64 ? ~0ull : (1ull << k) - 1;
  for (int phase = 0; phase < 2; ++phase) {
    const int* arcs = between.data() + static_cast<size_t>(phase) * k * k;
    uint64_t gone = 0;
    for (bool found = true; found && gone != all;) {
      found = false;
      for (int p = 0; p < k; ++p) {
        if (gone >> p & 1) continue;
        bool waits = false;
        for (int q = 0; q < k && !waits; ++q) waits = q != p && !(gone >> q & 1) && arcs[q * k + p] > 0;
        if (!waits) gone |= 1ull << p, found = true;
      }
    }
    if (gone != all) return false;
  }
  return true;
}

class State {
 public:
  State(const Hypergraph& graph, const Limits& limits, std::vector<int> part)
      : graph_(graph), limits_(limits), k_(limits.k), part_(std::move(part)) {
    touching_.assign(static_cast<size_t>(graph.num_nets()) * k_, 0);
    spread_.assign(graph.num_nets(), 0);
    weight_.assign(k_, 0);
    memory_.assign(k_, 0);
    load_.assign(k_, 0);
    between_.assign(static_cast<size_t>(2) * k_ * k_, 0);
    for (int v = 0; v < graph.n; ++v) total_ += graph.weight[v], total_memory_ += graph.memory[v];
    for (int v = 0; v < graph.n; ++v) count(v, part_[v], 1);
    for (int e = 0; e < graph.num_nets(); ++e) {
      for (int i = graph.xpins[e]; i < graph.xpins[e + 1]; ++i)
        if (pins(e, part_[graph.pins[i]])++ == 0) ++spread_[e];
      cut_ += graph.cost[e] * (spread_[e] - 1);
      if (spread_[e] > 1)
        for (int p = 0; p < k_; ++p)
          if (touching(e, p)) load_[p] += graph.cost[e] * limits.price[p];
    }
    for (const Arc& arc : graph.arcs) ++between(arc.phase, part_[arc.src], part_[arc.dst]);
  }

  const std::vector<int>& part() const { return part_; }
  int part(int v) const { return part_[v]; }
  int spread(int net) const { return spread_[net]; }
  int touching(int net, int p) const { return touching_[static_cast<size_t>(net) * k_ + p]; }
  double weight(int p) const { return weight_[p]; }

  void move(int v, int to) {
    const int from = part_[v];
    if (from == to) return;
    for (int i = graph_.xarcs[v]; i < graph_.xarcs[v + 1]; ++i) {
      const Arc& arc = graph_.arcs[graph_.arcs_of[i]];
      if (arc.src == v) --between(arc.phase, from, part_[arc.dst]), ++between(arc.phase, to, part_[arc.dst]);
      if (arc.dst == v) --between(arc.phase, part_[arc.src], from), ++between(arc.phase, part_[arc.src], to);
    }
    for (int i = graph_.xnets[v]; i < graph_.xnets[v + 1]; ++i) move_pin(graph_.nets[i], from, to);
    count(v, from, -1);
    count(v, to, 1);
    part_[v] = to;
  }

  // The excess of all parts over their limits, as a share of the whole.
  double violation() const {
    double found = 0;
    for (int p = 0; p < k_; ++p) {
      found += outside(p, weight_[p]);
      if (memory_[p] > limits_.memory[p]) found += (memory_[p] - limits_.memory[p]) / total_memory_;
    }
    return found;
  }

  double violation_after(int v, int to) const {
    const int from = part_[v];
    double found = outside(from, weight_[from] - graph_.weight[v]) + outside(to, weight_[to] + graph_.weight[v]) -
                   outside(from, weight_[from]) - outside(to, weight_[to]);
    const double left = memory_[from] - graph_.memory[v], joined = memory_[to] + graph_.memory[v];
    if (total_memory_ > 0)
      found += (std::max(0.0, left - limits_.memory[from]) + std::max(0.0, joined - limits_.memory[to]) -
                std::max(0.0, memory_[from] - limits_.memory[from]) - std::max(0.0, memory_[to] - limits_.memory[to])) /
               total_memory_;
    return found;
  }

  // True if the arcs between parts have no cycle, in each phase.
  bool acyclic() const { return no_cycle(between_, k_); }

  double cost() const {
    if (limits_.objective == Objective::kCut) return cut_;
    double worst = 0, sum = 0;
    for (int p = 0; p < k_; ++p) worst = std::max(worst, load_[p]), sum += load_[p];
    if (limits_.objective == Objective::kPipeline) return sum + (limits_.micro_batches - 1) * worst;
    return worst;
  }

  // As `cost`. For the largest load, plus a small share of the other loads: most moves would change nothing otherwise.
  double smooth_cost() const {
    if (limits_.objective == Objective::kCut) return cut_;
    double sum = 0, square = 0;
    for (int p = 0; p < k_; ++p) sum += load_[p], square += load_[p] * load_[p];
    return cost() + 0.05 * std::sqrt(square / k_) + 0.02 * sum / k_;
  }

  Score score() const { return {violation() + (limits_.acyclic && !acyclic() ? 1.0 : 0.0), cost()}; }

 private:
  size_t at(int phase, int from, int to) const { return (static_cast<size_t>(phase) * k_ + from) * k_ + to; }
  int& between(int phase, int from, int to) { return between_[at(phase, from, to)]; }
  int& pins(int net, int p) { return touching_[static_cast<size_t>(net) * k_ + p]; }

  double outside(int p, double weight) const {
    if (total_ <= 0) return 0;
    if (weight > limits_.high[p]) return (weight - limits_.high[p]) / total_;
    if (weight < limits_.low[p]) return (limits_.low[p] - weight) / total_;
    return 0;
  }

  // `sign` is 1 for a node that enters a part, and -1 for one that leaves it.
  void count(int v, int p, int sign) {
    weight_[p] += sign * graph_.weight[v];
    memory_[p] += sign * graph_.memory[v];
    load_[p] += sign * graph_.time[static_cast<size_t>(v) * k_ + p];
  }

  void move_pin(int e, int from, int to) {
    const double cost = graph_.cost[e];
    const bool was_cut = spread_[e] > 1;
    const bool left = --pins(e, from) == 0, came = pins(e, to)++ == 0;
    spread_[e] += came - left;
    cut_ += cost * (came - left);
    const bool is_cut = spread_[e] > 1;
    if (was_cut && left) load_[from] -= cost * limits_.price[from];
    if (is_cut && came) load_[to] += cost * limits_.price[to];
    if (was_cut != is_cut) {  // the parts that were in the net before, and still are
      const double change = is_cut ? cost : -cost;
      for (int p = 0; p < k_; ++p)
        if (touching(e, p) && !(p == to && came)) load_[p] += change * limits_.price[p];
    }
  }

  const Hypergraph& graph_;
  const Limits& limits_;
  int k_;
  std::vector<int> part_, touching_, spread_, between_;
  std::vector<double> weight_, memory_, load_;
  double cut_ = 0, total_ = 0, total_memory_ = 0;
};

}  // namespace hocket::partition
