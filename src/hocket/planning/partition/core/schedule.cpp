// The objective `time`: devices and order of all ops, so that the step ends the earliest.
//
// An op starts when its device has reached it and each tensor it reads is there: when its maker has finished, plus
// `delay` if that is another device. Every schedule in which no op could start earlier is one assignment and one
// topological order, so those are what is searched: from HEFT (H. Topcuoglu et al., IEEE TPDS 2002) and from all ops on
// one device by annealing, and for small graphs by branch and bound, which proves the shortest.

#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>

#include "refine.h"

namespace hocket::partition {
namespace {

struct Wait {
  int op;
  double delay;
};

struct Steps {
  int n, k;
  std::vector<double> duration;  // n rows of k
  std::vector<std::vector<Wait>> before, after;
  std::vector<std::vector<int>> groups;  // ops that are on one device
  std::vector<int> group;
  std::vector<double> memory, room;  // of each group; on each device
  std::vector<double> tail;  // from the start of an op to the end of the step, on the fastest devices, delays aside
  double at(int op, int device) const { return duration[static_cast<size_t>(op) * k + device]; }
  // The start of an op on a device that is idle from `start` on: after its inputs have arrived.
  double ready(int op, int d, double start, const std::vector<int>& device, const std::vector<double>& finish) const {
    for (const Wait& wait : before[op])
      start = std::max(start, finish[wait.op] + (device[wait.op] == d ? 0 : wait.delay));
    return start;
  }
  bool alike() const {
    for (int op = 0; op < n; ++op)
      for (int d = 1; d < k; ++d)
        if (at(op, d) != at(op, 0)) return false;
    return true;
  }
};

struct Choice {
  std::vector<int> device, order;
  double takes = std::numeric_limits<double>::infinity();
};

std::vector<double> held(const Steps& steps, const std::vector<int>& device) {
  std::vector<double> found(steps.k, 0);
  for (size_t g = 0; g < steps.groups.size(); ++g) found[device[steps.groups[g][0]]] += steps.memory[g];
  return found;
}

bool fits(const Steps& steps, const std::vector<int>& device) {
  const std::vector<double> found = held(steps, device);
  for (int d = 0; d < steps.k; ++d)
    if (found[d] > steps.room[d]) return false;
  return true;
}

// The duration of a choice. `finish` and `idle` are scratch.
double simulated(const Steps& steps, const Choice& choice, std::vector<double>& finish, std::vector<double>& idle) {
  idle.assign(steps.k, 0);
  double last = 0;
  for (const int op : choice.order) {
    const int d = choice.device[op];
    finish[op] = idle[d] = steps.ready(op, d, idle[d], choice.device, finish) + steps.at(op, d);
    last = std::max(last, finish[op]);
  }
  return last;
}

// HEFT without insertion: by the longest way to the end, each op where it ends the earliest. With delays counted by
// `share` in that way; 0 and 1 differ where communication is dear.
Choice heft(const Steps& steps, const std::vector<int>& topological, double share) {
  std::vector<double> rank(steps.n), finish(steps.n), idle(steps.k, 0);
  for (int i = steps.n - 1; i >= 0; --i) {
    const int op = topological[i];
    double own = 0;
    for (int d = 0; d < steps.k; ++d) own += steps.at(op, d) / steps.k;
    for (const Wait& wait : steps.after[op]) rank[op] = std::max(rank[op], share * wait.delay + rank[wait.op]);
    rank[op] += own;
  }
  std::vector<int> place(steps.n);
  for (int i = 0; i < steps.n; ++i) place[topological[i]] = i;
  Choice choice{std::vector<int>(steps.n), topological};
  std::sort(choice.order.begin(), choice.order.end(), [&](int a, int b) {
    return rank[a] != rank[b] ? rank[a] > rank[b] : place[a] < place[b];
  });
  std::vector<int> fixed(steps.groups.size(), -1);
  std::vector<double> left = steps.room;
  for (const int op : choice.order) {
    double soonest = std::numeric_limits<double>::infinity();
    int& home = fixed[steps.group[op]];
    const double needs = home < 0 ? steps.memory[steps.group[op]] : 0;
    bool room = false;
    for (int d = 0; d < steps.k; ++d) room = room || left[d] >= needs;
    for (int d = 0; d < steps.k; ++d) {
      if ((home >= 0 && home != d) || (room && left[d] < needs)) continue;
      const double end = steps.ready(op, d, idle[d], choice.device, finish) + steps.at(op, d);
      if (end < soonest) soonest = end, choice.device[op] = d;
    }
    if (home < 0) left[choice.device[op]] -= needs;
    home = choice.device[op];
    finish[op] = idle[home] = soonest;
  }
  choice.takes = *std::max_element(finish.begin(), finish.end());
  return choice;
}

void anneal_schedule(const Steps& steps, Choice& best, Random& random, long moves, Clock::time_point end) {
  Choice now = best;
  std::vector<double> finish(steps.n), idle;
  std::vector<int> place(steps.n);
  for (int i = 0; i < steps.n; ++i) place[now.order[i]] = i;
  std::vector<double> used = held(steps, now.device);
  const double hot = 0.1 * now.takes, cold = 1e-4 * now.takes;
  for (long step = 0; step < moves; ++step) {
    if ((step & 255) == 0 && Clock::now() > end) return;
    const double temperature = hot * std::pow(cold / hot, static_cast<double>(step) / static_cast<double>(moves));
    const int op = below(random, steps.n), device = now.device[op], at = place[op];
    int to = device, slot = at;
    const uint64_t what = random() % 4;
    if (what != 0) {  // another device, more often one that a neighbour is on
      const auto& around = random() % 2 ? steps.before[op] : steps.after[op];
      to = !around.empty() && random() % 4 ? now.device[around[random() % around.size()].op] : below(random, steps.k);
    }
    if (what < 2) {  // another place between what it waits for and what waits for it
      int first = 0, last = steps.n - 1;
      for (const Wait& wait : steps.before[op]) first = std::max(first, place[wait.op] + 1);
      for (const Wait& wait : steps.after[op]) last = std::min(last, place[wait.op] - 1);
      slot = first + below(random, last - first + 1);
    }
    if (to == device && slot == at) continue;
    const int group = steps.group[op];
    if (to != device && used[to] + steps.memory[group] > steps.room[to]) continue;
    const auto place_group = [&](int on) {
      used[now.device[op]] -= steps.memory[group];
      used[on] += steps.memory[group];
      for (const int member : steps.groups[group]) now.device[member] = on;
    };
    const auto shift = [&](int from, int into) {
      const auto begin = now.order.begin();
      if (from < into) std::rotate(begin + from, begin + from + 1, begin + into + 1);
      if (from > into) std::rotate(begin + into, begin + from, begin + from + 1);
      for (int i = std::min(from, into); i <= std::max(from, into); ++i) place[now.order[i]] = i;
    };
    shift(at, slot);
    place_group(to);
    const double takes = simulated(steps, now, finish, idle);
    if (takes <= now.takes || unit(random) < std::exp((now.takes - takes) / temperature)) {
      now.takes = takes;
      if (takes < best.takes) best = now;
    } else {
      place_group(device);
      shift(slot, at);
    }
  }
}

// All orders by start and all devices, as long as they could beat the best that is known.
class BranchAndBound {
 public:
  BranchAndBound(const Steps& steps, Choice& best, long most) : steps_(steps), best_(best), left_(most), alike_(steps.alike()) {
    now_.device.assign(steps.n, -1);
    finish_.assign(steps.n, 0);
    idle_.assign(steps.k, 0);
    waiting_.assign(steps.n, 0);
    for (int op = 0; op < steps.n; ++op) waiting_[op] = static_cast<int>(steps.before[op].size());
    for (int op = 0; op < steps.n; ++op) {
      double least = steps.at(op, 0);
      for (int d = 1; d < steps.k; ++d) least = std::min(least, steps.at(op, d));
      fastest_.push_back(least);
      work_ += least;
    }
  }

  // True if the best schedule is proved to be the shortest.
  bool run() {
    place(0, -1, 0, 0);
    return left_ > 0;
  }

 private:
  void place(double since, int last_op, int used, double end) {
    if (--left_ <= 0) return;
    if (static_cast<int>(now_.order.size()) == steps_.n) {
      if (end < best_.takes) best_ = now_, best_.takes = end;
      return;
    }
    if (bound(since, end) >= best_.takes * (1 - 1e-9)) return;
    for (int op = 0; op < steps_.n; ++op) {
      if (now_.device[op] >= 0 || waiting_[op] > 0) continue;
      const auto& before = steps_.before[op];
      const bool waits = std::any_of(before.begin(), before.end(), [&](const Wait& wait) { return wait.op == last_op; });
      for (int d = 0; d < steps_.k && (!alike_ || d <= used); ++d) {
        const double start = steps_.ready(op, d, idle_[d], now_.device, finish_);
        // Starts come in their order; of those at one time on different devices, the lower number first.
        if (start < since) continue;
        if (start == since && op < last_op && !waits && now_.device[last_op] != d) continue;
        if (start + steps_.tail[op] - fastest_[op] + steps_.at(op, d) >= best_.takes * (1 - 1e-9)) continue;
        const double was_idle = idle_[d];
        now_.device[op] = d;
        now_.order.push_back(op);
        finish_[op] = idle_[d] = start + steps_.at(op, d);
        work_ -= fastest_[op];
        for (const Wait& wait : steps_.after[op]) --waiting_[wait.op];
        place(start, op, std::max(used, d + 1), std::max(end, finish_[op]));
        for (const Wait& wait : steps_.after[op]) ++waiting_[wait.op];
        work_ += fastest_[op];
        idle_[d] = was_idle;
        now_.order.pop_back();
        now_.device[op] = -1;
        if (left_ <= 0) return;
      }
    }
  }

  double bound(double since, double end) const {
    double free = 0;
    for (const double idle : idle_) free += std::max(idle, since);
    double least = std::max(end, (work_ + free) / steps_.k);
    for (int op = 0; op < steps_.n; ++op) {
      if (now_.device[op] >= 0) continue;
      double soonest = since;
      if (waiting_[op] == 0) {  // ready: try each device
        soonest = std::numeric_limits<double>::infinity();
        for (int d = 0; d < steps_.k; ++d)
          soonest = std::min(soonest, steps_.ready(op, d, std::max(idle_[d], since), now_.device, finish_));
      }
      least = std::max(least, soonest + steps_.tail[op]);
    }
    return least;
  }

  const Steps& steps_;
  Choice& best_;
  Choice now_;
  std::vector<double> finish_, idle_, fastest_;
  std::vector<int> waiting_;
  double work_ = 0;
  long left_;
  bool alike_;
};

}  // namespace
}  // namespace hocket::partition

// Searches for `rounds` annealings within `budget_s`; then, with `proof` nodes to look at, by branch and bound.
// `group` numbers the ops that are on one device, `memory` is by group and `room` by device. `start` is an assignment to
// begin with, or null. Returns 1 if what it found is proved to be the shortest, -1 if nothing fits.
extern "C" int hocket_schedule(int n, int k, const double* duration, int waits, const int* src, const int* dst,
                               const double* delay, int groups, const int* group, const double* memory,
                               const double* room, const int* start, uint64_t seed, int rounds, double budget_s,
                               int64_t proof, int* device, int* order, double* takes) {
  using namespace hocket::partition;
  Steps steps{n, k, {duration, duration + static_cast<size_t>(n) * k}};
  steps.tail.assign(n, 0);
  steps.groups.resize(groups);
  steps.group.assign(group, group + n);
  for (int op = 0; op < n; ++op) steps.groups[group[op]].push_back(op);
  steps.memory.assign(memory, memory + groups);
  steps.room.assign(room, room + k);
  steps.before.resize(n);
  steps.after.resize(n);
  for (int i = 0; i < waits; ++i) {
    steps.before[dst[i]].push_back({src[i], delay[i]});
    steps.after[src[i]].push_back({dst[i], delay[i]});
  }
  std::vector<int> topological, waiting(n);
  for (int op = 0; op < n; ++op) waiting[op] = static_cast<int>(steps.before[op].size());
  for (int op = 0; op < n; ++op)
    if (waiting[op] == 0) topological.push_back(op);
  for (size_t i = 0; i < topological.size(); ++i)
    for (const Wait& wait : steps.after[topological[i]])
      if (--waiting[wait.op] == 0) topological.push_back(wait.op);
  for (int i = n - 1; i >= 0; --i) {
    const int op = topological[i];
    for (const Wait& wait : steps.after[op]) steps.tail[op] = std::max(steps.tail[op], steps.tail[wait.op]);
    steps.tail[op] += *std::min_element(duration + static_cast<size_t>(op) * k, duration + static_cast<size_t>(op + 1) * k);
  }
  const Clock::time_point end = Clock::now() + std::chrono::microseconds(static_cast<int64_t>(budget_s * 1e6));
  Random random(seed);
  std::vector<Choice> starts{heft(steps, topological, 1), heft(steps, topological, 0)};
  std::vector<double> finish(n), idle;
  for (int d = 0; d < k; ++d) {
    Choice one{std::vector<int>(n, d), topological};
    one.takes = simulated(steps, one, finish, idle);
    starts.push_back(one);
  }
  if (start) {
    Choice given{{start, start + n}, starts[0].order};
    given.takes = simulated(steps, given, finish, idle);
    starts.push_back(given);
  }
  std::erase_if(starts, [&](const Choice& choice) { return !fits(steps, choice.device); });
  if (starts.empty()) return -1;
  std::sort(starts.begin(), starts.end(), [](const Choice& a, const Choice& b) { return a.takes < b.takes; });
  Choice best = starts[0];
  for (int round = 0; round < rounds && Clock::now() < end; ++round) {
    Choice from = round % 2 ? best : starts[(round / 2) % starts.size()];
    anneal_schedule(steps, from, random, 400L * n, end);
    if (from.takes < best.takes) best = from;
  }
  // Branch and bound knows neither groups nor memory.
  const bool plain = groups == n && *std::max_element(room, room + k) == std::numeric_limits<double>::infinity();
  const bool proved = proof > 0 && plain && BranchAndBound(steps, best, proof).run();
  std::memcpy(device, best.device.data(), sizeof(int) * static_cast<size_t>(n));
  std::memcpy(order, best.order.data(), sizeof(int) * static_cast<size_t>(n));
  *takes = best.takes;
  return proved;
}
