// The cores that a thread is pinned to.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <vector>

namespace hocket {

// Pin the calling thread to `cpus`; OpenMP teams that it starts inherit them. The system call takes several
// microseconds, so it is made only if the thread is pinned otherwise (`current`).
inline void pin(const std::vector<int>& cpus, cpu_set_t& current) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) CPU_SET(cpu, &set);
  if (CPU_EQUAL(&set, &current)) return;
  TORCH_CHECK(!pthread_setaffinity_np(pthread_self(), sizeof(set), &set), "a lane cannot be pinned to its cores");
  current = set;
}

// Restore the caller's cores and its number of threads after a step. Torch's new threads start with the latter, so it is
// also restored if another thread of the step has set it (`retuned`).
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
