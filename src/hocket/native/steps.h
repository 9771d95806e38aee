// Synchronisation of a step's threads: waits for actions, for channels, and for the end. No torch and no Python here.
//
// Steps are numbered from 1. Threads wait for words that hold such numbers (see waiting.h):
//
//   word                  written by                                       waited for by
//   one for each action   the worker that ran it; of a channel op the      workers of the same step; channels, of this step
//                         channel, perhaps one step ahead                  and before what they begin for the next
//   finished              workers: how many are done with this step        the caller, at the step's end
//
// Numbers only grow, so a waiter waits for the number of its step *or more*: a channel op of the next step may have
// arrived already. All reads and writes that a wake-up depends on are sequentially consistent, so a thread that reads a
// word sees everything that was written before the word.
//
// An op's error or an interrupt *leaves* a step before its end (`fail`); a failed channel or closed lanes leave all steps
// (`abort`). `left_` is the number of the step that was left: it is written before the words are raised to wake sleeping
// threads, and read after every wait. So a waiter that sees the word at its number and `left_` unset may assume that the
// action completed. `left_` is never reset: a channel's thread, which no end of a step waits for, may read it later.
// `fail` is called by threads that the end of the step waits for, so it cannot affect the next step. `abort` may be called
// at any moment, between steps or while one begins: it raises the words to the step after the last one that has begun,
// and no thread waits for a later one.

#pragma once

#include "waiting.h"

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

namespace hocket {

class Steps {
 public:
  // The reason why a step was left; worker and action are -1 if it is not an op's error.
  struct Failure {
    std::exception_ptr why;
    int worker = -1;
    int action = -1;
  };

  explicit Steps(int num_words) : words_(static_cast<size_t>(num_words)) {}

  // Called by the caller before it starts the workers: begin a step and return its number.
  uint32_t begin() {
    finished_.value.store(0, std::memory_order_relaxed);
    return ++last_;
  }

  // Called by the caller: wait until this many workers are done, with calls of `poll` now and then.
  template <typename Poll>
  void join(uint32_t workers, int64_t spin_ns, const Poll& poll) {
    for (uint32_t seen; (seen = finished_.load()) < workers;) {
      if (!spin({spin_ns}, [&] { return finished_.load() != seen; })) sleep_on(finished_, seen, kPollNs);
      poll();
    }
  }

  // Called by the caller after `join`: the reason why the step was left, or nothing.
  Failure failure(uint32_t epoch) {
    const std::lock_guard<std::mutex> locked(failing_);
    if (!is_left(epoch)) return {};
    return left_ == kAll ? failure_ : std::exchange(failure_, {});
  }

  // A worker has finished a step.
  void finish() {
    finished_.value.fetch_add(1);
    wake(finished_);
  }

  // The number of the last step that has begun.
  uint32_t last() const { return last_; }

  // An action of a step has completed, or a channel op of it has arrived.
  void done(int word, uint32_t epoch) { store_and_wake(words_[static_cast<size_t>(word)], epoch); }

  // True if a step was left, in the middle or before it began.
  bool is_left(uint32_t epoch) const {
    const uint64_t left = left_.load();
    return left == epoch || left == kAll;
  }

  // Wait until an action of a step has completed, or the step was left. Spins, then sleeps, with a call of `poll` each
  // `timeout_ns` (0: never).
  template <typename Poll>
  void wait(int number, uint32_t epoch, Spin how, int64_t timeout_ns, const Poll& poll) {
    Word& word = words_[static_cast<size_t>(number)];
    if (spin(how, [&] { return reached(word.load(), epoch); })) return;
    for (uint32_t seen; !reached(seen = word.load(), epoch);) {
      if (is_left(epoch)) return;
      sleep_on(word, seen, timeout_ns);
      poll();
    }
  }

  // Sleep until an action of a step has completed; false if the step was left.
  bool await(int word, uint32_t epoch) {
    wait(word, epoch, {0}, 0, [] {});
    return !is_left(epoch);
  }

  // Called by a thread of the step in progress: leave it. The first reason counts.
  void fail(uint32_t epoch, Failure failure) {
    {
      const std::lock_guard<std::mutex> locked(failing_);
      if (is_left(epoch)) return;
      failure_ = std::move(failure);
      left_ = epoch;
    }
    raise_words(epoch);
  }

  // Called by any thread at any time: leave the step in progress, and every later one as it begins.
  void abort(std::exception_ptr why) {
    {
      const std::lock_guard<std::mutex> locked(failing_);
      if (left_ == kAll) return;
      if (!failure_.why) failure_.why = std::move(why);
      left_ = kAll;
    }
    raise_words(last_ + 1);
  }

 private:
  static constexpr uint64_t kNone = uint64_t{1} << 32;  // no step has these numbers
  static constexpr uint64_t kAll = kNone + 1;

  // No thread sleeps on a word that is reached, and it may be one ahead.
  void raise_words(uint32_t epoch) {
    for (Word& word : words_)
      if (!reached(word.load(), epoch)) store_and_wake(word, epoch);
  }

  std::vector<Word> words_;
  std::atomic<uint32_t> last_{0};
  Word finished_;
  std::atomic<uint64_t> left_{kNone};
  std::mutex failing_;
  Failure failure_;
};

}  // namespace hocket
