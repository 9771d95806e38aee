// Whether any partition keeps all limits: by trying all, so for few nodes. It decides where the search found none.

#include <cstdint>
#include <cstring>
#include <numeric>

#include "state.h"

namespace hocket::partition {
namespace {

class Exhaustive {
 public:
  Exhaustive(const Hypergraph& graph, const Limits& limits, long most)
      : graph_(graph), limits_(limits), part_(graph.n, -1), left_(most) {
    order_.resize(graph.n);
    std::iota(order_.begin(), order_.end(), 0);
    // Heavy ones first, so that what cannot fit shows soon.
    std::sort(order_.begin(), order_.end(), [&](int a, int b) {
      return graph.weight[a] != graph.weight[b] ? graph.weight[a] > graph.weight[b] : a < b;
    });
    weight_.assign(limits.k, 0);
    memory_.assign(limits.k, 0);
    for (const double weight : graph.weight) remaining_ += weight;
    slack_ = 1e-9 * remaining_;
    between_.assign(static_cast<size_t>(2) * limits.k * limits.k, 0);
  }

  // 1: yes, and `part` has it; 0: no; -1: not known.
  int run() { return place(0) ? 1 : left_ > 0 ? 0 : -1; }
  const std::vector<int>& part() const { return part_; }

 private:
  bool place(int at) {
    if (--left_ <= 0) return false;
    double needed = 0, room = 0;
    for (int p = 0; p < limits_.k; ++p) {
      needed += std::max(0.0, limits_.low[p] - weight_[p]);
      room += limits_.high[p] - weight_[p];
    }
    if (needed > remaining_ + slack_ || room < remaining_ - slack_) return false;
    if (at == graph_.n) return true;
    const int v = order_[at];
    for (int p = 0; p < limits_.k && left_ > 0; ++p) {
      if (weight_[p] + graph_.weight[v] > limits_.high[p] + slack_ ||
          memory_[p] + graph_.memory[v] > limits_.memory[p] || same_as_before(p))
        continue;
      part_[v] = p;
      count(v, 1);
      if (!limits_.acyclic || acyclic()) {
        weight_[p] += graph_.weight[v];
        memory_[p] += graph_.memory[v];
        remaining_ -= graph_.weight[v];
        if (place(at + 1)) return true;
        remaining_ += graph_.weight[v];
        memory_[p] -= graph_.memory[v];
        weight_[p] -= graph_.weight[v];
      }
      count(v, -1);
      part_[v] = -1;
    }
    return false;
  }

  // An empty part with the limits of an earlier empty one gives nothing new.
  bool same_as_before(int p) const {
    const auto empty = [&](int q) { return std::find(part_.begin(), part_.end(), q) == part_.end(); };
    if (!empty(p)) return false;
    for (int q = 0; q < p; ++q)
      if (limits_.low[q] == limits_.low[p] && limits_.high[q] == limits_.high[p] &&
          limits_.memory[q] == limits_.memory[p] && empty(q))
        return true;
    return false;
  }

  void count(int v, int by) {
    for (int i = graph_.xarcs[v]; i < graph_.xarcs[v + 1]; ++i) {
      const Arc& arc = graph_.arcs[graph_.arcs_of[i]];
      const int from = part_[arc.src], to = part_[arc.dst];
      if (from >= 0 && to >= 0) between_[(static_cast<size_t>(arc.phase) * limits_.k + from) * limits_.k + to] += by;
    }
  }

  bool acyclic() const { return no_cycle(between_, limits_.k); }

  const Hypergraph& graph_;
  const Limits& limits_;
  std::vector<int> part_, order_, between_;
  std::vector<double> weight_, memory_;
  double remaining_ = 0, slack_ = 0;
  long left_;
};

}  // namespace
}  // namespace hocket::partition

extern "C" int hocket_feasible(const hocket_problem* given, int64_t most, int* part) {
  using namespace hocket::partition;
  const Hypergraph graph = graph_of(*given);
  const Limits limits = limits_of(*given);
  Exhaustive search(graph, limits, most);
  const int found = search.run();
  if (found == 1) std::memcpy(part, search.part().data(), sizeof(int) * static_cast<size_t>(graph.n));
  return found;
}
