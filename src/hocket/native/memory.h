// Memory of the lanes: a block that an op gives back is kept for the next op, or the next step, that wants its size.
//
// The system's allocator returns large blocks to the kernel at each free, and every page of them faults in again in the
// next step: up to a quarter of a step. Since all steps of a plan want the same sizes, blocks are kept here instead. They
// are cut from one range of addresses, reserved once and backed by huge pages where the kernel has them. The address of a
// block says at any free, on any thread, which allocator it came from.
//
//   lane    allocate(n), large  --> the smallest free piece that is large enough (large_blocks.h)
//           allocate(n), medium --> list of n's size class --> next larger classes --> a new block from the range
//   any thread    free          --> where it came from
//   all others    allocate(n)   --> the allocator that was there before
//
// Only threads that run a lane allocate here, and only while they run it. Small blocks and all other threads use the
// allocator that was there before. When an executor is closed, the pages of all free blocks go back to the system.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <mutex>
#include <vector>

#include "large_blocks.h"

namespace hocket {

class KeptMemory final : public c10::Allocator {
 public:
  // The instance of this process. The first call installs it in front of the usual allocator.
  static KeptMemory& instance() {
    static KeptMemory* made = install();
    return *made;
  }

  // During its lifetime, its thread allocates here.
  class Use {
   public:
    Use() : before_(used_) { used_ = true; }
    ~Use() { used_ = before_; }
    Use(const Use&) = delete;

   private:
    bool before_;
  };

  c10::DataPtr allocate(size_t size_bytes) override {
    if (used_ && size_bytes >= kSmallest && size_bytes <= kRange) {
      if (void* block = size_bytes < kLarge ? take(size_bytes) : large_.take(size_bytes)) return {block, block, &give_back, c10::Device(c10::DeviceType::CPU)};
    }
    return usual_->allocate(size_bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t size_bytes) const override {
    default_copy_data(to, from, size_bytes);
  }

  // Executors that are still open fault their pages in again in their next step.
  void close() {
    release();
    large_.release();
  }

  // Bytes of all blocks cut so far, in use or free.
  size_t size_bytes() { return next_.load() + large_.size_bytes(); }

 private:
  static constexpr size_t kSmallest = 4096;
  static constexpr size_t kLarge = size_t{1} << 17;
  static constexpr size_t kRange = size_t{1} << 37;  // for medium blocks, and as much again for large ones
  static constexpr size_t kHeader = 64;  // before each block: its class; blocks stay aligned for vector loads
  static constexpr int kSteps = 8;       // classes per doubling, so at most an eighth of a block is unused
  static constexpr int kClasses = 20 * kSteps;
  static constexpr int kLarger = 4;      // larger classes that may serve a request: up to 1.5 times its size

  struct alignas(64) List {
    std::mutex guard;
    std::vector<void*> blocks;
  };

  static KeptMemory* install() {
    auto* made = new KeptMemory();  // never destroyed: its blocks may outlive everything
    made->usual_ = c10::GetAllocator(c10::DeviceType::CPU);
    void* range = mmap(nullptr, 2 * kRange, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return made;  // address space is limited: nothing is kept
    madvise(range, 2 * kRange, MADV_HUGEPAGE);
    range_ = static_cast<char*>(range);
    made->large_.open(range_ + kRange, kRange);
    installed_ = made;
    c10::SetAllocator(c10::DeviceType::CPU, made, UINT8_MAX);
    return made;
  }

  static int class_of(size_t size_bytes) {
    const int power = std::bit_width(size_bytes - 1) - 1;  // 2^power < size <= 2^(power+1)
    const size_t step = (size_t{1} << power) / kSteps;
    return power * kSteps + static_cast<int>((size_bytes - 1 - (size_t{1} << power)) / step);
  }

  static size_t size_of(int number) {
    const size_t base = size_t{1} << (number / kSteps);
    return base + base / kSteps * (number % kSteps + 1);
  }

  void* take(size_t size_bytes) {
    const int wanted = class_of(size_bytes);
    for (int number = wanted; number <= wanted + kLarger; ++number) {
      List& list = lists_[number];
      const std::lock_guard<std::mutex> locked(list.guard);
      if (!list.blocks.empty()) {
        void* block = list.blocks.back();
        list.blocks.pop_back();
        return block;
      }
    }
    const size_t whole = size_of(wanted) + kHeader;
    const size_t at = next_.fetch_add(whole);
    if (at + whole > kRange) {
      next_.fetch_sub(whole);
      return nullptr;
    }
    *reinterpret_cast<int*>(range_ + at) = wanted;
    return range_ + at + kHeader;
  }

  static void give_back(void* block) {
    auto* address = static_cast<char*>(block);
    if (range_ != nullptr && installed_->large_.owns(block)) {
      installed_->large_.give_back(block);
      return;
    }
    if (address < range_ || address >= range_ + kRange) {
      installed_->usual_->raw_deleter()(block);
      return;
    }
    List& list = installed_->lists_[*reinterpret_cast<int*>(address - kHeader)];
    const std::lock_guard<std::mutex> locked(list.guard);
    list.blocks.push_back(block);
  }

  void release() {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (int number = 0; number < kClasses; ++number) {
      const std::lock_guard<std::mutex> locked(lists_[number].guard);
      for (void* block : lists_[number].blocks) {
        const auto begin = (reinterpret_cast<uintptr_t>(block) + page - 1) / page * page;
        const auto end = (reinterpret_cast<uintptr_t>(block) + size_of(number)) / page * page;
        if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
      }
    }
  }

  static inline thread_local bool used_ = false;
  static inline char* range_ = nullptr;
  static inline KeptMemory* installed_ = nullptr;

  c10::Allocator* usual_ = nullptr;
  std::array<List, kClasses> lists_;
  std::atomic<size_t> next_{0};
  LargeBlocks large_;
};

}  // namespace hocket
