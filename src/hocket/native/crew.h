// Threads that run lanes, shared by all plans of this process: a step claims one for each worker but the caller's.
//
// A compiled model's forward, backward and update are three plans a step. With threads of their own each of them would
// wake its threads from sleep, at 50 us, and those of the plan before would spin on the cores meanwhile. A shared thread
// that has just done its part of one plan is awake for the next one.
//
//   caller   claim --> ring ...................... join (steps.h)
//   member   idle: spins, then sleeps --> part of a step --> free to be claimed --> finished --> idle
//
// Members stand in groups by the width and the cores of their lanes, so that a thread keeps its place and its team of
// OpenMP's: a team's threads stay on the cores that they were begun on. A group has as many members as were claimed at
// once so far. Those of width 1 live as long as the process. Wide ones end with the last plan that uses them: libgomp
// counts the threads of all teams, and lets none of them spin for long once they are more than the cores.
//
// No torch and no Python here.

#pragma once

#include "waiting.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace hocket {

// A plan whose steps a crew runs.
struct CrewTask {
  virtual ~CrewTask() = default;

  // One worker's part of a step, on a member's thread, which is pinned to `cpus`.
  virtual void work(size_t worker, uint32_t epoch, cpu_set_t& cpus) = 0;
  // After a part, when its member can be claimed again.
  virtual void finish() = 0;
};

class CrewMember {
 public:
  // A member that is claimed, with its thread.
  static std::shared_ptr<CrewMember> begin() {
    auto made = std::make_shared<CrewMember>();
    std::thread([made] { made->serve(); }).detach();
    return made;
  }

  bool claim() { return !is_claimed_.exchange(true, std::memory_order_acquire); }
  void release() { is_claimed_.store(false, std::memory_order_release); }

  // The claimed member does this part. Without a task its thread ends.
  void ring(std::shared_ptr<CrewTask> task, size_t worker, uint32_t epoch) {
    task_ = std::move(task);
    worker_ = worker;
    epoch_ = epoch;
    store_and_wake(bell_, bell_.load() + 1);
  }

 private:
  void serve() {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    pthread_getaffinity_np(pthread_self(), sizeof(cpus), &cpus);
    int64_t spin_ns = kIdleSpinNs;
    for (uint32_t seen = 0;; ++seen) {
      const int64_t start_ns = now_ns();
      spin({spin_ns}, [&] { return bell_.load() != seen; });
      while (bell_.load() == seen) sleep_on(bell_, seen, 0);
      spin_ns = now_ns() - start_ns < kShortGapNs ? kShortGapNs : kIdleSpinNs;
      const auto task = std::move(task_);  // lives until its last member is done with it
      if (task == nullptr) return;
      task->work(worker_, epoch_, cpus);
      release();
      task->finish();
    }
  }

  Word bell_;
  std::atomic<bool> is_claimed_{true};
  std::shared_ptr<CrewTask> task_;
  size_t worker_ = 0;
  uint32_t epoch_ = 0;
};

class CrewGroup {
 public:
  // No plan uses it any more, so that no member has a part of a step.
  ~CrewGroup() {
    for (auto& member : members_) member->ring(nullptr, 0, 0);
  }

  // A member that is free, or a new one.
  CrewMember& claim() {
    const std::lock_guard<std::mutex> locked(mutex_);
    for (auto& member : members_)
      if (member->claim()) return *member;
    return *members_.emplace_back(CrewMember::begin());
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<CrewMember>> members_;
};

class Crew {
 public:
  // The one of this process. In a forked child it is a new one, since threads stay behind.
  static Crew& instance() {
    static const bool renewed = pthread_atfork(nullptr, nullptr, [] { current() = new Crew; }) == 0;
    return renewed ? *current() : throw std::runtime_error("lanes cannot be prepared for forks of this process");
  }

  std::shared_ptr<CrewGroup> group(int width, const std::vector<int>& cpus) {
    const std::lock_guard<std::mutex> locked(mutex_);
    auto& known = groups_[{width, cpus}];
    auto found = known.lock();
    if (found == nullptr) {
      known = found = std::make_shared<CrewGroup>();
      if (width == 1) kept_.push_back(found);
    }
    return found;
  }

 private:
  // Never destroyed: its threads run until the process ends.
  static Crew*& current() {
    static Crew* made = new Crew;
    return made;
  }

  std::mutex mutex_;
  std::map<std::pair<int, std::vector<int>>, std::weak_ptr<CrewGroup>> groups_;
  std::vector<std::shared_ptr<CrewGroup>> kept_;
};

}  // namespace hocket
