// Inputs of a step that share memory: a plan orders ops by this pattern, so it must be that of the recording.
//
// Each input has a class; two inputs share a storage if and only if their class is the same. Most storages are the same in
// every step (parameters, state) and cost one comparison of addresses. Those that change (the batch, tensors that the step
// binds anew) are looked up in a table.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace hocket {

// Map addresses to classes. It is not cleared: entries of earlier rounds have another number.
class AddressTable {
 public:
  // Begin a round, with room for this many addresses.
  void start(size_t num_addresses) {
    while (size_t{1} << bits_ < 2 * num_addresses) bits_++;
    if (entries_.size() != size_t{1} << bits_) entries_.assign(size_t{1} << bits_, {});
    round_++;
  }
  // The class of an address in this round, or -1.
  int find(const void* address) const {
    const auto& entry = entries_[place_of(address)];
    return entry.round == round_ ? entry.memory : -1;
  }
  // The class of an address; a new address gets the given class.
  int add(const void* address, int memory) {
    auto& entry = entries_[place_of(address)];
    if (entry.round != round_) entry = {address, round_, memory};
    return entry.memory;
  }

 private:
  struct Entry {
    const void* address = nullptr;
    uint64_t round = 0;
    int memory = -1;
  };

  size_t place_of(const void* address) const {
    auto at = static_cast<size_t>(reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15u >> (64 - bits_));
    while (entries_[at].round == round_ && entries_[at].address != address) at = (at + 1) & (entries_.size() - 1);
    return at;
  }

  size_t bits_ = 3;
  uint64_t round_ = 1;
  std::vector<Entry> entries_ = std::vector<Entry>(8);
};

class SharedMemory {
 public:
  void add(int memory) {
    if (static_cast<size_t>(memory) >= is_steady_class_.size()) is_steady_class_.resize(static_cast<size_t>(memory) + 1);
    inputs_.push_back({nullptr, memory, true});
  }

  // Begin a step. Its tensors follow in the order in which they were added.
  void start() { at_ = 0; }

  // False for a tensor without a storage.
  bool next(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return false;
    const void* now = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    auto& input = inputs_[at_++];
    if (now == input.seen) return true;
    if (input.is_steady && input.seen != nullptr) input.is_steady = is_known_ = false;
    input.seen = now;
    return true;
  }

  // True if equal addresses have equal classes and vice versa, as in the recording. A backward reads hundreds of
  // activations, each with another address in every step.
  bool holds() {
    if (!is_known_ && !learn()) return false;
    fresh_.start(inputs_.size());
    address_of_.assign(is_steady_class_.size(), nullptr);
    for (const auto& input : inputs_) {
      if (input.is_steady) continue;
      const int steady = steady_.find(input.seen);
      if (steady == input.memory) continue;
      if (steady >= 0 || is_steady_class_[static_cast<size_t>(input.memory)]) return false;
      auto& known = address_of_[static_cast<size_t>(input.memory)];
      if (known != nullptr && known != input.seen) return false;
      known = input.seen;
      if (fresh_.add(input.seen, input.memory) != input.memory) return false;
    }
    return true;
  }

 private:
  struct Input {
    const void* seen;
    int memory;
    bool is_steady;
  };

  bool learn() {
    steady_.start(inputs_.size());
    is_steady_class_.assign(is_steady_class_.size(), false);
    address_of_.assign(is_steady_class_.size(), nullptr);
    for (const auto& input : inputs_) {
      if (!input.is_steady) continue;
      auto& known = address_of_[static_cast<size_t>(input.memory)];
      if (known != nullptr && known != input.seen) return false;
      known = input.seen;
      if (steady_.add(input.seen, input.memory) != input.memory) return false;
      is_steady_class_[static_cast<size_t>(input.memory)] = true;
    }
    return is_known_ = true;
  }

  std::vector<Input> inputs_;
  size_t at_ = 0;
  bool is_known_ = false;  // the steady inputs are in their table
  AddressTable steady_, fresh_;  // inputs of one address in every step; the others, anew in each
  std::vector<char> is_steady_class_;
  std::vector<const void*> address_of_;  // by class
};

}  // namespace hocket
