// The search for a partition: multilevel cycles from many starts, and from what two good partitions agree on.
//
//   start      given ones; and partitions of a coarse hypergraph, refined level by level
//   improve    join nodes that lie in one part (of two parents: in one part of each), refine level by level
//
// G. Karypis, V. Kumar: Multilevel k-way partitioning scheme for irregular graphs, JPDC 1998, has the levels; the
// recombination is that of P. Sanders, C. Schulz: Distributed evolutionary graph partitioning, ALENEX 2012.

#include <cstring>
#include <numeric>

#include "refine.h"

namespace hocket::partition {
namespace {

class Search {
 public:
  Search(const Hypergraph& graph, const Limits& limits, uint64_t seed, double budget_s)
      : graph_(graph),
        limits_(limits),
        random_(seed),
        end_(Clock::now() + std::chrono::microseconds(static_cast<int64_t>(budget_s * 1e6))) {
    for (const double weight : graph.weight) total_ += weight;
  }

  bool late() const { return Clock::now() > end_; }

  struct Found {
    std::vector<int> part;
    Score score;
  };

  Found refined(std::vector<int> part) {
    State state(graph_, limits_, std::move(part));
    refine(graph_, state, 0.02);
    return {state.part(), state.score()};
  }

  // A cycle over all levels. Only nodes of one label are joined, so `part` holds on every level.
  Found cycle(std::vector<int> part, const std::vector<int>& label, double heat) {
    std::vector<Hypergraph> levels;
    std::vector<std::vector<int>> maps;
    std::vector<int> labels = label, coarse = std::move(part);
    coarsen(levels, maps, labels, &coarse);
    return uncoarsened(levels, maps, std::move(coarse), heat);
  }

  // Without a start: neighbouring nodes join, and the coarsest level is cut.
  Found fresh() {
    std::vector<Hypergraph> levels;
    std::vector<std::vector<int>> maps;
    std::vector<int> labels(graph_.n, 0);
    coarsen(levels, maps, labels, nullptr);
    const Hypergraph& top = levels.empty() ? graph_ : levels.back();
    return uncoarsened(levels, maps, grown(top), 0.3);
  }

  // Cut in two, and each of the two again: small cuts that a cut into k at once does not see.
  Found bisected() {
    std::vector<int> part(graph_.n, 0), all(graph_.n);
    std::iota(all.begin(), all.end(), 0);
    bisect(all, 0, limits_.k, part);
    return cycle(part, part, 0.005);
  }

  Random& random() { return random_; }

 private:
  void refine(const Hypergraph& graph, State& state, double heat) {
    const bool small = static_cast<size_t>(graph.n) * limits_.k <= 30000;
    if (limits_.objective == Objective::kCut) {
      if (small && graph.n <= 600) anneal(graph, limits_, state, random_, std::max(5000L, 300L * graph.n), heat, end_);
      FiducciaMattheyses moves(graph, limits_, state, random_, end_);
      double heaviest = 0;
      for (const double weight : graph.weight) heaviest = std::max(heaviest, weight);
      const double slack = total_ > 0 ? std::min(0.05, 2 * heaviest / total_) : 0;
      for (int pass = 0; pass < 12 && !late(); ++pass)
        if (!moves.pass(pass % 2 == 0 ? 0 : slack) && pass > 0) break;
    } else {
      anneal(graph, limits_, state, random_, small ? std::max(5000L, 400L * graph.n) : 20L * graph.n, heat, end_);
    }
  }

  // Nodes in random order join the cluster that they share the most with, as long as it stays light.
  int clusters(const Hypergraph& graph, const std::vector<int>& label, double heaviest, std::vector<int>& to) {
    std::vector<int> order(graph.n);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<int> leader(graph.n, -1);
    std::vector<double> heavy(graph.weight), shared(graph.n, 0);
    std::vector<int> met;
    for (const int v : order) {
      if (leader[v] >= 0) continue;
      met.clear();
      for (int i = graph.xnets[v]; i < graph.xnets[v + 1]; ++i) {
        const int e = graph.nets[i];
        if (graph.size(e) > kLargeNet) continue;
        const double share = graph.cost[e] / (graph.size(e) - 1);
        for (int j = graph.xpins[e]; j < graph.xpins[e + 1]; ++j) {
          const int u = graph.pins[j];
          if (u == v || label[u] != label[v]) continue;
          const int at = leader[u] >= 0 ? leader[u] : u;
          if (at == v) continue;
          if (shared[at] == 0) met.push_back(at);
          shared[at] += share + 1e-300;
        }
      }
      int best = -1;
      double most = 0;
      for (const int u : met) {
        const double rating = shared[u] * (0.7 + 0.6 * unit(random_));
        if (heavy[u] + graph.weight[v] <= heaviest && rating > most) most = rating, best = u;
        shared[u] = 0;
      }
      leader[v] = best < 0 ? v : best;
      if (best >= 0) {
        leader[best] = best;
        heavy[best] += graph.weight[v];
      }
    }
    to.assign(graph.n, -1);
    int count = 0;
    for (int v = 0; v < graph.n; ++v)
      if (leader[v] == v) to[v] = count++;
    for (int v = 0; v < graph.n; ++v) to[v] = to[leader[v]];
    return count;
  }

  void coarsen(std::vector<Hypergraph>& levels, std::vector<std::vector<int>>& maps, std::vector<int>& labels,
               std::vector<int>* part) {
    const double fine = limits_.k * (8.0 + 40.0 * unit(random_));
    const double heaviest = total_ / fine * 2;
    const Hypergraph* at = &graph_;
    std::vector<int> to;
    while (at->n > fine && !late()) {
      const int count = clusters(*at, labels, heaviest, to);
      if (count > 0.95 * at->n) break;
      std::vector<int> next(count);
      for (int v = 0; v < at->n; ++v) next[to[v]] = labels[v];
      if (part) {
        std::vector<int> joined(count);
        for (int v = 0; v < at->n; ++v) joined[to[v]] = (*part)[v];
        *part = std::move(joined);
      }
      labels = std::move(next);
      Hypergraph coarse = contracted(*at, to, count);
      levels.push_back(std::move(coarse));
      maps.push_back(to);
      at = &levels.back();
    }
  }

  Found uncoarsened(const std::vector<Hypergraph>& levels, const std::vector<std::vector<int>>& maps,
                    std::vector<int> part, double heat) {
    for (int level = static_cast<int>(levels.size()); level >= 0; --level) {
      const Hypergraph& graph = level == 0 ? graph_ : levels[level - 1];
      State state(graph, limits_, std::move(part));
      refine(graph, state, level == static_cast<int>(levels.size()) ? heat : std::min(heat, 0.02));
      part = state.part();
      if (level > 0) {
        std::vector<int> finer(maps[level - 1].size());
        for (size_t v = 0; v < finer.size(); ++v) finer[v] = part[maps[level - 1][v]];
        part = std::move(finer);
      }
    }
    const State state(graph_, limits_, part);
    return {std::move(part), state.score()};
  }

  void bisect(const std::vector<int>& nodes, int first, int last, std::vector<int>& part) {
    if (last - first < 2 || nodes.size() < 2) {
      for (const int v : nodes) part[v] = first;
      return;
    }
    const int middle = (first + last) / 2;
    const Hypergraph graph = restricted(graph_, nodes, 2);
    double has = 0, share[2] = {0, 0}, slack[2] = {0, 0};
    for (const double weight : graph.weight) has += weight;
    Limits limits{2, Objective::kCut, false, 1, {}, {}, {0, 0}, {1, 1}};
    for (int p = first; p < last; ++p) {
      const bool bounded = std::isfinite(limits_.high[p]);
      share[p >= middle] += bounded ? limits_.high[p] : 1;
      slack[p >= middle] += bounded ? limits_.high[p] : 1.05;
      limits.memory[p >= middle] += limits_.memory[p];
    }
    for (int side = 0; side < 2; ++side) {
      // Later cuts need some of the room, too: halfway between the share and all that would fit.
      const double target = has * share[side] / (share[0] + share[1]);
      limits.high.push_back(target + 0.5 * std::max(0.0, std::min(slack[side], 1.1 * target) - target) + 1e-9 * has);
      limits.low.push_back(0);
    }
    if (last - first == 2) limits.high = {slack[0], slack[1]}, limits.low = {limits_.low[first], limits_.low[middle]};
    Search search(graph, limits, random_(), 0);
    search.end_ = end_;
    Found best = search.fresh();
    for (int again = 0; again < 3; ++again) {
      Found other = search.fresh();
      if (other.score < best.score) best = std::move(other);
    }
    std::vector<int> sides[2];
    for (size_t i = 0; i < nodes.size(); ++i) sides[best.part[i]].push_back(nodes[i]);
    bisect(sides[0], first, middle, part);
    bisect(sides[1], middle, last, part);
  }

  // Parts grown from random nodes over shared nets, each until it has its share.
  std::vector<int> grown(const Hypergraph& graph) {
    std::vector<int> part(graph.n, -1), order(graph.n);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    size_t next = 0;
    for (int p = 0; p + 1 < limits_.k; ++p) {
      const double share = std::isfinite(limits_.high[p]) ? (limits_.low[p] + limits_.high[p]) / 2 : total_ / limits_.k;
      double has = 0;
      std::vector<int> border;
      while (has < share) {
        int v = -1;
        while (!border.empty() && v < 0) {
          const size_t at = random_() % border.size();
          std::swap(border[at], border.back());
          if (part[border.back()] < 0) v = border.back();
          border.pop_back();
        }
        for (; v < 0 && next < order.size(); ++next)
          if (part[order[next]] < 0) v = order[next];
        if (v < 0) break;
        part[v] = p;
        has += graph.weight[v];
        for (int i = graph.xnets[v]; i < graph.xnets[v + 1]; ++i) {
          const int e = graph.nets[i];
          if (graph.size(e) > kLargeNet) continue;
          for (int j = graph.xpins[e]; j < graph.xpins[e + 1]; ++j)
            if (part[graph.pins[j]] < 0) border.push_back(graph.pins[j]);
        }
      }
    }
    for (int& p : part)
      if (p < 0) p = limits_.k - 1;
    return part;
  }

  const Hypergraph& graph_;
  const Limits& limits_;
  Random random_;
  Clock::time_point end_;
  double total_ = 0;
};

constexpr size_t kPopulation = 8;

}  // namespace
}  // namespace hocket::partition

extern "C" {

// The best partition found within `rounds` cycles and `budget_s`. `starts` has `num_starts` rows of n; the best is
// written to `best`. Returns the number of cycles.
int hocket_search(const hocket_problem* given, const int* starts, int num_starts, uint64_t seed, int rounds,
                  double budget_s, int* best, double* violation, double* cost) {
  using namespace hocket::partition;
  const Hypergraph graph = graph_of(*given);
  const Limits limits = limits_of(*given);
  Search search(graph, limits, seed, budget_s);
  std::vector<Search::Found> population;
  const auto add = [&](Search::Found found) {
    for (const auto& other : population)
      if (other.part == found.part) return;
    population.push_back(std::move(found));
    std::sort(population.begin(), population.end(), [](const auto& a, const auto& b) { return a.score < b.score; });
    if (population.size() > kPopulation) population.pop_back();
  };
  for (int i = 0; i < num_starts; ++i) {  // unchanged, so that the result is never worse, even without any time
    std::vector<int> part(starts + static_cast<size_t>(i) * graph.n, starts + static_cast<size_t>(i + 1) * graph.n);
    const State state(graph, limits, part);
    add({part, state.score()});
  }
  const std::vector<Search::Found> given_ones = population;
  int round = 0;
  for (const auto& start : given_ones)
    if (!search.late()) add(search.cycle(start.part, start.part, 0.02)), ++round;
  for (; round < rounds && !search.late(); ++round) {
    Random& random = search.random();
    const int what = below(random, 10);
    if (population.empty() || (!limits.acyclic && (round < 6 || what < 2))) {
      add(limits.k > 2 && round % 2 ? search.bisected() : search.fresh());
      continue;
    }
    const size_t first = std::min(random() % population.size(), random() % population.size());
    const std::vector<int> better = population[first].part;
    std::vector<int> label = better;
    if (what < 6 && population.size() > 1) {
      const std::vector<int>& other = population[random() % population.size()].part;
      for (int v = 0; v < graph.n; ++v) label[v] = better[v] * limits.k + other[v];
    }
    const double heats[] = {0.005, 0.02, 0.1, 0.3};
    add(search.cycle(better, label, heats[random() % 4]));
  }
  std::memcpy(best, population.front().part.data(), sizeof(int) * static_cast<size_t>(graph.n));
  *violation = population.front().score.violation;
  *cost = population.front().score.cost;
  return round;
}

}  // extern "C"
