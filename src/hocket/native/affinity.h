// The cores that a thread is pinned to.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <sched.h>

#include <atomic>
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

// The caller gets back what a step may change: the cores it may use, and the number of threads for its ops, which new
// threads of torch's begin with, too, whichever thread of the step has set it (`retuned`).
class Usual {
 public:
  explicit Usual(std::atomic<bool>& retuned) : width_(at::get_num_threads()), retuned_(retuned) {
    pthread_getaffinity_np(pthread_self(), sizeof(cpus_), &cpus_);
    current = cpus_;
  }
  ~Usual() {
    if (retuned_.exchange(false)) at::set_num_threads(width_);
    if (!CPU_EQUAL(&cpus_, &current)) pthread_setaffinity_np(pthread_self(), sizeof(cpus_), &cpus_);
  }
  Usual(const Usual&) = delete;

  cpu_set_t current;

 private:
  int width_;
  std::atomic<bool>& retuned_;
  cpu_set_t cpus_;
};

}  // namespace hocket
