// How the threads of a step wait for one another, for channels, and for its end. No torch and no Python here.
//
// Steps are numbered from 1 on. What threads wait for are words that hold such numbers (see waiting.h):
//
//   word                  written by                                       waited for by
//   one for each action   the worker that ran it; of a channel op the      workers of the same step; channels, of this step
//                         channel, perhaps one step ahead                  and before what they begin for the next
//   finished              workers: how many are done with this step        the caller, at the step's end
//
// Numbers only grow, so who waits for a step waits for its number *or more*: a channel op of the next step may have
// arrived already. All writes and reads that a wake-up hangs on are sequentially consistent, and a write to a word makes
// all that was done before it visible to who has seen it.
//
// A step is *left* before its end by an op's error or an interrupt (`fail`); all steps are, once a channel has failed or
// the lanes are closed (`abort`). Which is `left_`: it is written before the words are raised to wake who sleeps, and
// looked at after every wait. So who finds a word reached and the step not left knows that the action was done. It is
// never taken back: a channel's thread, which no step's end waits for, may look later. `fail` is for threads that the
// end of the step waits for, so it cannot reach into the next one. `abort` may come at any moment, between steps or
// while one begins: it raises words to the step after the last one that has begun, and nobody waits for a later one.

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
  // Why a step was left; worker and action are -1 where it is not an op's error.
  struct Failure {
    std::exception_ptr why;
    int worker = -1;
    int action = -1;
  };

  explicit Steps(int num_words) : words_(static_cast<size_t>(num_words)) {}

  // The caller, before it lets the workers go: the number of the step.
  uint32_t begin() {
    finished_.value.store(0, std::memory_order_relaxed);
    return ++last_;
  }

  // The caller: returns when so many workers are done. Looks around (`poll`) now and then.
  template <typename Poll>
  void join(uint32_t workers, int64_t spin_ns, const Poll& poll) {
    for (uint32_t seen; (seen = finished_.load()) < workers;) {
      if (!spin({spin_ns}, [&] { return finished_.load() != seen; })) sleep_on(finished_, seen, kPollNs);
      poll();
    }
  }

  // The caller, after `join`: why the step was left; nothing if it was not.
  Failure failure(uint32_t epoch) {
    const std::lock_guard<std::mutex> locked(failing_);
    if (!is_left(epoch)) return {};
    return left_ == kAll ? failure_ : std::exchange(failure_, {});
  }

  // A worker is done with a step.
  void finish() {
    finished_.value.fetch_add(1);
    wake(finished_);
  }

  // Number of the last step that has begun.
  uint32_t last() const { return last_; }

  // An action of a step is done, or a channel op of it has arrived.
  void done(int word, uint32_t epoch) { store_and_wake(words_[static_cast<size_t>(word)], epoch); }

  // Whether a step was left, in the middle or before it began.
  bool is_left(uint32_t epoch) const {
    const uint64_t left = left_.load();
    return left == epoch || left == kAll;
  }

  // Returns when an action of a step is done, or the step was left. Spins, then sleeps and looks around (`poll`) each
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

  // Sleeps until an action of a step is done; false if the step was left.
  bool await(int word, uint32_t epoch) {
    wait(word, epoch, {0}, 0, [] {});
    return !is_left(epoch);
  }

  // A thread of the step in progress: leaves it. The first reason counts.
  void fail(uint32_t epoch, Failure failure) {
    {
      const std::lock_guard<std::mutex> locked(failing_);
      if (is_left(epoch)) return;
      failure_ = std::move(failure);
      left_ = epoch;
    }
    raise_words(epoch);
  }

  // Any thread, at any time: leaves the step in progress, and every later one as it begins.
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

  // A word that is reached has nobody asleep for it, and may be one ahead.
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
