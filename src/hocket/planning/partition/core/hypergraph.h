// The problem that the search works on: ops that are placed together are one node, a tensor is a net.
//
// A net has the op that makes a tensor and all that read it as its pins; it costs `cost` for every part but one that
// it touches (objective cut), or once in the load of each part that it touches if those are two or more (load).

#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <unordered_map>
#include <vector>

// The input of a call. The caller owns the arrays.
extern "C" struct hocket_problem {
  int n, k, nets, arcs;
  const int *xpins, *pins;
  const double *cost, *weight, *memory, *time;
  const int *arc_src, *arc_dst, *arc_phase;
  const double *low, *high, *memory_limit, *price;
  int objective, acyclic;
  double micro_batches;
};

namespace hocket::partition {

enum class Objective : int { kCut = 0, kLoad = 1, kPipeline = 2 };

struct Arc {
  int src, dst, phase;  // phase: arcs of one phase must make no cycle between parts, whatever the others do
  auto operator<=>(const Arc&) const = default;
};

// Limits and objective, which stay the same while nodes are joined.
struct Limits {
  int k = 1;
  Objective objective = Objective::kCut;
  bool acyclic = false;
  double micro_batches = 1;
  std::vector<double> low, high, memory;  // for each part
  std::vector<double> price;              // what a part pays of the cost of a net that it touches (load)
};

struct Hypergraph {
  int n = 0, k = 1;
  std::vector<double> weight, memory, time;  // time: n rows of k
  std::vector<int> xpins{0}, pins;           // by net
  std::vector<double> cost;
  std::vector<int> xnets, nets;  // by node
  std::vector<Arc> arcs;
  std::vector<int> xarcs, arcs_of;  // by node, both ends

  int num_nets() const { return static_cast<int>(cost.size()); }
  int size(int net) const { return xpins[net + 1] - xpins[net]; }

  void index() {
    xnets.assign(n + 1, 0);
    for (const int v : pins) ++xnets[v + 1];
    for (int v = 0; v < n; ++v) xnets[v + 1] += xnets[v];
    nets.resize(pins.size());
    std::vector<int> at(xnets.begin(), xnets.end() - 1);
    for (int e = 0; e < num_nets(); ++e)
      for (int i = xpins[e]; i < xpins[e + 1]; ++i) nets[at[pins[i]]++] = e;
    xarcs.assign(n + 1, 0);
    for (const Arc& arc : arcs) ++xarcs[arc.src + 1], ++xarcs[arc.dst + 1];
    for (int v = 0; v < n; ++v) xarcs[v + 1] += xarcs[v];
    arcs_of.resize(2 * arcs.size());
    at.assign(xarcs.begin(), xarcs.end() - 1);
    for (int i = 0; i < static_cast<int>(arcs.size()); ++i) {
      arcs_of[at[arcs[i].src]++] = i;
      arcs_of[at[arcs[i].dst]++] = i;
    }
  }
};

// The hypergraph that joins nodes of one `label` (0 to count - 1) into one, and nets with the same pins.
inline Hypergraph contracted(const Hypergraph& fine, const std::vector<int>& label, int count) {
  Hypergraph coarse;
  coarse.n = count;
  coarse.k = fine.k;
  coarse.weight.assign(count, 0);
  coarse.memory.assign(count, 0);
  coarse.time.assign(static_cast<size_t>(count) * fine.k, 0);
  for (int v = 0; v < fine.n; ++v) {
    const int to = label[v];
    coarse.weight[to] += fine.weight[v];
    coarse.memory[to] += fine.memory[v];
    for (int p = 0; p < fine.k; ++p) coarse.time[static_cast<size_t>(to) * fine.k + p] += fine.time[static_cast<size_t>(v) * fine.k + p];
  }
  std::unordered_map<uint64_t, std::vector<int>> known;
  std::vector<int> found;
  for (int e = 0; e < fine.num_nets(); ++e) {
    found.clear();
    for (int i = fine.xpins[e]; i < fine.xpins[e + 1]; ++i) found.push_back(label[fine.pins[i]]);
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    if (found.size() < 2) continue;
    uint64_t hash = 14695981039346656037ull;
    for (const int v : found) hash = (hash ^ static_cast<uint64_t>(v)) * 1099511628211ull;
    int same = -1;
    for (const int other : known[hash])
      if (coarse.size(other) == static_cast<int>(found.size()) &&
          std::equal(found.begin(), found.end(), coarse.pins.begin() + coarse.xpins[other]))
        same = other;
    if (same >= 0) {
      coarse.cost[same] += fine.cost[e];
      continue;
    }
    known[hash].push_back(coarse.num_nets());
    coarse.pins.insert(coarse.pins.end(), found.begin(), found.end());
    coarse.xpins.push_back(static_cast<int>(coarse.pins.size()));
    coarse.cost.push_back(fine.cost[e]);
  }
  coarse.arcs.reserve(fine.arcs.size());
  for (const Arc& arc : fine.arcs)
    if (label[arc.src] != label[arc.dst]) coarse.arcs.push_back({label[arc.src], label[arc.dst], arc.phase});
  std::sort(coarse.arcs.begin(), coarse.arcs.end());
  coarse.arcs.erase(std::unique(coarse.arcs.begin(), coarse.arcs.end()), coarse.arcs.end());
  coarse.index();
  return coarse;
}

// A part of a hypergraph: the nodes of `kept`, in this order, for k parts. Times on the parts are not known.
inline Hypergraph restricted(const Hypergraph& whole, const std::vector<int>& kept, int k) {
  Hypergraph part;
  part.n = static_cast<int>(kept.size());
  part.k = k;
  std::vector<int> at(whole.n, -1);
  for (int i = 0; i < part.n; ++i) {
    at[kept[i]] = i;
    part.weight.push_back(whole.weight[kept[i]]);
    part.memory.push_back(whole.memory[kept[i]]);
  }
  part.time.assign(static_cast<size_t>(part.n) * k, 0);
  for (int e = 0; e < whole.num_nets(); ++e) {
    const size_t before = part.pins.size();
    for (int i = whole.xpins[e]; i < whole.xpins[e + 1]; ++i)
      if (at[whole.pins[i]] >= 0) part.pins.push_back(at[whole.pins[i]]);
    if (part.pins.size() - before < 2) {
      part.pins.resize(before);
      continue;
    }
    part.xpins.push_back(static_cast<int>(part.pins.size()));
    part.cost.push_back(whole.cost[e]);
  }
  part.index();
  return part;
}

inline Hypergraph graph_of(const hocket_problem& given) {
  Hypergraph graph;
  graph.n = given.n;
  graph.k = given.k;
  graph.weight.assign(given.weight, given.weight + given.n);
  graph.memory.assign(given.memory, given.memory + given.n);
  graph.time.assign(given.time, given.time + static_cast<size_t>(given.n) * given.k);
  graph.xpins.assign(given.xpins, given.xpins + given.nets + 1);
  graph.pins.assign(given.pins, given.pins + given.xpins[given.nets]);
  graph.cost.assign(given.cost, given.cost + given.nets);
  for (int i = 0; i < given.arcs; ++i) graph.arcs.push_back({given.arc_src[i], given.arc_dst[i], given.arc_phase[i]});
  graph.index();
  return graph;
}

inline Limits limits_of(const hocket_problem& given) {
  const auto row = [&](const double* values) { return std::vector<double>(values, values + given.k); };
  return {given.k,        static_cast<Objective>(given.objective), given.acyclic != 0,
          given.micro_batches, row(given.low), row(given.high), row(given.memory_limit), row(given.price)};
}

}  // namespace hocket::partition
