// The cores that a thread is pinned to.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <sched.h>

#include <vector>

namespace hocket {

// The calling thread stays on `cpus`; teams that it begins inherit that. A system call of several microseconds, so only
// where it is not there already (`current`).
inline void pin(const std::vector<int>& cpus, cpu_set_t& current) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) CPU_SET(cpu, &set);
  if (CPU_EQUAL(&set, &current)) return;
  TORCH_CHECK(!pthread_setaffinity_np(pthread_self(), sizeof(set), &set), "a lane cannot be pinned to its cores");
  current = set;
}

// The caller gets back what a step may change: the number of threads for its ops, and the cores it may use.
class Usual {
 public:
  explicit Usual(cpu_set_t& current) : width_(at::get_num_threads()), current_(current) {
    pthread_getaffinity_np(pthread_self(), sizeof(cpus_), &cpus_);
    current_ = cpus_;
  }
  ~Usual() {
    if (at::get_num_threads() != width_) at::set_num_threads(width_);
    if (!CPU_EQUAL(&cpus_, &current_)) pthread_setaffinity_np(pthread_self(), sizeof(cpus_), &cpus_);
  }
  Usual(const Usual&) = delete;

 private:
  int width_;
  cpu_set_t cpus_;
  cpu_set_t& current_;
};

}  // namespace hocket
