// Random steps on the waiting protocol of src/hocket/native/steps.h, for ThreadSanitizer: workers of a crew (crew.h) that
// serves two callers at once, channels that run one step ahead, errors of ops, channels that fail at any moment. What actions and transfers write is plain memory, so a
// wait that is missing or too weak is a data race, besides a wrong number; a lost wake-up is a run that does not end.
//
//     steps_stress SEED STEPS

#include "crew.h"
#include "steps.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using hocket::Steps;

constexpr int kWorkers = 3, kActions = 4, kReceives = 3;
constexpr int kOps = kWorkers * kActions;
constexpr int kSend = kOps + kReceives;  // word and value of the one op that is sent

struct Plan {
  std::vector<int> waits[kOps];   // of each action, words
  std::vector<int> uses[kReceives];  // the actions that wait for a receive
};

[[noreturn]] void die(const char* what, unsigned epoch) {
  std::fprintf(stderr, "steps_stress: %s in step %u\n", what, epoch);
  std::abort();
}

// Lanes with a channel each way, until a step is left; or without channels, and then an op's error ends one step only.
class Run : public hocket::CrewTask, public std::enable_shared_from_this<Run> {
 public:
  Run(unsigned seed, const Plan& plan, bool has_channels)
      : plan_(plan), seed_(seed), has_channels_(has_channels), steps_(kSend + 1) {
    for (int worker = 0; worker < kWorkers; ++worker) chances_.emplace_back(seed + static_cast<unsigned>(worker));
    if (!has_channels) return;
    threads_.emplace_back([this] { channel(false); });
    threads_.emplace_back([this] { channel(true); });
    threads_.emplace_back([this] { wire(); });
  }

  ~Run() {
    steps_.abort(std::make_exception_ptr(std::runtime_error("closed")));
    for (auto& queue : begun_) queue.put(0);
    wire_.put({-1, 0});
    for (auto& thread : threads_) thread.join();
  }

  // False: the step was left, and no further one can be run.
  bool step(std::mt19937& chance) {
    const uint32_t epoch = steps_.last() + 1;
    failing_ = chance() % 30 == 0 ? static_cast<int>(chance() % kOps) : -1;
    for (auto& queue : begun_) queue.put(epoch);
    if (chance() % 2) std::this_thread::yield();
    const auto group = hocket::Crew::instance().group(static_cast<int>(seed_ % 2) + 1, {});
    hocket::CrewMember* members[kWorkers] = {};
    for (int worker = 1; worker < kWorkers; ++worker) members[worker] = &group->claim();
    if (steps_.begin() != epoch) die("another number", epoch);
    for (int worker = 1; worker < kWorkers; ++worker)
      members[worker]->ring(shared_from_this(), static_cast<size_t>(worker), epoch);
    run_worker(0, epoch, chance);
    steps_.join(kWorkers - 1, 100, [] {});
    if (steps_.failure(epoch).why) return !has_channels_;
    if (failing_ >= 0) die("an error was lost", epoch);
    for (int op = 0; op < kOps; ++op)
      if (values_[op] != epoch) die("an action was left out", epoch);
    return !has_channels_ || steps_.await(kSend, epoch);  // of a step all transfers have arrived before the next one
  }

 private:
  template <typename Item>
  class Queue {
   public:
    void put(Item item) {
      const std::lock_guard<std::mutex> locked(mutex_);
      items_.push_back(item);
      changed_.notify_one();
    }
    Item get() {
      std::unique_lock<std::mutex> locked(mutex_);
      changed_.wait(locked, [this] { return !items_.empty(); });
      const Item item = items_.front();
      items_.pop_front();
      return item;
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Item> items_;
  };

  static void idle(std::mt19937& chance) {
    if (chance() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(chance() % 200));
  }

  static hocket::Spin how(std::mt19937& chance) { return {chance() % 2 ? 500 : 0, chance() % 2 == 0}; }

  void work(size_t worker, uint32_t epoch, cpu_set_t&) override {
    run_worker(static_cast<int>(worker), epoch, chances_[worker]);
  }
  void finish() override { steps_.finish(); }

  void run_worker(int worker, uint32_t epoch, std::mt19937& chance) {
    for (int at = 0; at < kActions; ++at) {
      const int op = worker * kActions + at;
      for (int word : plan_.waits[op]) steps_.wait(word, epoch, how(chance), worker ? 0 : hocket::kPollNs, [] {});
      if (steps_.is_left(epoch)) return;
      if (op == failing_) {
        steps_.fail(epoch, {std::make_exception_ptr(std::runtime_error("an op failed")), worker, at});
        return;
      }
      for (int word : plan_.waits[op])
        if (values_[word] != epoch) die("a value is not of this step", epoch);
      idle(chance);
      values_[op] = epoch;
      steps_.done(op, epoch);
    }
  }

  // Begins transfers in their order: of this step, then those of the next step whose memory is free.
  void channel(bool sends) {
    while (const uint32_t epoch = begun_[sends].get()) {
      if (sends) {
        if (steps_.await(kOps - 1, epoch)) {
          if (values_[kOps - 1] != epoch) die("a value is sent too early", epoch);
          wire_.put({kSend, epoch});
        }
        continue;
      }
      for (int receive = 0; receive < kReceives && epoch == 1; ++receive) wire_.put({kOps + receive, epoch});
      for (int receive = 0; receive < kReceives; ++receive) {
        bool free = true;
        for (int op : plan_.uses[receive]) free = free && steps_.await(op, epoch);
        if (!free || !steps_.await(kOps + receive, epoch)) break;
        wire_.put({kOps + receive, epoch + 1});
      }
    }
  }

  struct Transfer {
    int word;
    uint32_t epoch;
  };

  void wire() {
    std::mt19937 chance(seed_ + 99);
    for (Transfer transfer; (transfer = wire_.get()).word >= 0;) {
      idle(chance);
      if (chance() % 100 == 0) {
        steps_.abort(std::make_exception_ptr(std::runtime_error("the channel failed")));
        continue;
      }
      values_[transfer.word] = transfer.epoch;
      steps_.done(transfer.word, transfer.epoch);
    }
  }

  const Plan plan_;
  unsigned seed_;
  bool has_channels_;
  Steps steps_;
  int failing_ = -1;
  uint32_t values_[kSend + 1] = {};
  Queue<uint32_t> begun_[2];
  Queue<Transfer> wire_;
  std::vector<std::mt19937> chances_;  // of each worker
  std::vector<std::thread> threads_;   // of channels
};

Plan random_plan(std::mt19937& chance, bool has_channels) {
  Plan plan;
  for (int op = 0; op < kOps; ++op) {
    for (int at = 0; at < op % kActions; ++at)  // actions at earlier places, so nobody waits in a circle
      if (chance() % 2) plan.waits[op].push_back(static_cast<int>(chance() % kWorkers) * kActions + at);
    for (int receive = 0; receive < kReceives && has_channels; ++receive) {
      if (chance() % 3) continue;
      plan.waits[op].push_back(kOps + receive);
      plan.uses[receive].push_back(op);
    }
  }
  return plan;
}

// As many runs as these steps take, one after another; their number.
int runs(unsigned seed, int steps) {
  int count = 0;
  std::mt19937 chance(seed);
  for (int left = steps; left > 0; ++count) {
    const bool has_channels = chance() % 8 != 0;
    const Plan plan = random_plan(chance, has_channels);
    const auto run = std::make_shared<Run>(chance(), plan, has_channels);
    for (int at = 0; at < 50 && left > 0 && run->step(chance); ++at) --left;
    --left;
  }
  return count;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const auto seed = static_cast<unsigned>(std::atoi(arguments[1]));
  const int steps = std::atoi(arguments[2]);
  int others = 0;
  std::thread beside([&] { others = runs(seed + 1000, steps / 2); });
  const int mine = runs(seed, steps / 2);
  beside.join();
  std::printf("%d runs\n", mine + others);
  return 0;
}
