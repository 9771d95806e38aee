// Words that threads wait for. No torch here, so that the waiting can be tested by itself.
//
// A wait is on one 32-bit word: the waiter spins for a while and then sleeps (futex). The number of sleeping threads is
// beside the word: it is mostly 0, and then waking takes no system call.

#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace hocket {

struct Word {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  uint32_t load() const { return value.load(std::memory_order_acquire); }
};

// Waking a sleeper takes the waker 13 us and the sleeper 38 in a virtual machine, each time.
constexpr int64_t kSpinNs = 1'000'000;     // inside a step, while no op needs the core
constexpr int64_t kYieldNs = 300'000;      // inside a step, while an op has the core
constexpr int64_t kIdleSpinNs = 20'000;    // between steps: other programs may need the core,
constexpr int64_t kShortGapNs = 200'000;   // unless the last step came this soon after its predecessor
constexpr int64_t kPollNs = 20'000'000;    // between looks for Ctrl-C in a long step

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The time to spin on a word before sleeping, and whether other threads of the step need the core meanwhile.
struct Spin {
  int64_t limit_ns;
  bool gives_way = false;
};

// Spin until the condition holds; false after the time to spin.
template <typename IsOver>
bool spin(Spin how, const IsOver& is_over) {
  int64_t until_ns = 0;
  while (how.limit_ns > 0) {
    for (int i = 0; i < 64; ++i) {
      if (is_over()) return true;
      if (how.gives_way) {
        sched_yield();
        break;
      }
      pause_cpu();  // 10 ns to 50, by the processor
    }
    const int64_t now = now_ns();
    if (until_ns == 0) until_ns = now + how.limit_ns;
    if (now > until_ns) break;
  }
  return is_over();
}

// True if a word that counts steps has reached this number; it may be one ahead. The counts may wrap around.
inline bool reached(uint32_t seen, uint32_t epoch) { return static_cast<int32_t>(seen - epoch) >= 0; }

// Sleep until the word may have changed from `seen`, or for `timeout_ns` (0: no limit).
inline void sleep_on(Word& word, uint32_t seen, int64_t timeout_ns) {
  timespec limit{static_cast<time_t>(timeout_ns / 1'000'000'000), static_cast<long>(timeout_ns % 1'000'000'000)};
  word.sleepers.fetch_add(1);
  if (word.value.load() == seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word.value), FUTEX_WAIT_PRIVATE, seen, timeout_ns ? &limit : nullptr,
            nullptr, 0);
  }
  word.sleepers.fetch_sub(1);
}

// Sequentially consistent, here and above: either the sleeper sees the new value, or we see the sleeper.
inline void wake(Word& word) {
  if (word.sleepers.load()) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word.value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

inline void store_and_wake(Word& word, uint32_t value) {
  word.value.store(value);
  wake(word);
}

}  // namespace hocket
