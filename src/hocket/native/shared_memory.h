// Which inputs of a step share memory: a plan orders ops by it, so the pattern has to be that of the recording.
//
// Each input has a class; two inputs share a storage if and only if they are of one class. Most storages are the same in
// every step (parameters, state), and comparing their addresses is all that they cost. Those that change (the batch, what
// the step binds anew) are looked up among them.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hocket {

class SharedMemory {
 public:
  void add(int memory) {
    if (static_cast<size_t>(memory) >= is_steady_class_.size()) is_steady_class_.resize(static_cast<size_t>(memory) + 1);
    inputs_.push_back({nullptr, memory, true});
  }

  // Before the tensors of a step are given, in the order in which they were added.
  void start() { at_ = 0, is_known_ = !steady_.empty() || inputs_.empty(); }

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

  // Whether the storages of this step share memory as those of the recording did.
  bool holds() {
    if (!is_known_ && !learn()) return false;
    fresh_.clear();
    for (const auto& input : inputs_) {
      if (input.is_steady) continue;
      const auto found = steady_.find(input.seen);
      if (found != steady_.end() ? found->second != input.memory : is_steady_class_[static_cast<size_t>(input.memory)])
        return false;
      if (found == steady_.end()) fresh_.emplace_back(input.seen, input.memory);
    }
    return is_one_to_one();
  }

 private:
  struct Input {
    const void* seen;
    int memory;
    bool is_steady;
  };

  // Whether equal addresses have equal classes, and the other way round. Sorted, equal ones are neighbours: a backward
  // reads hundreds of activations, of which each has another address in every step.
  bool is_one_to_one() {
    std::sort(fresh_.begin(), fresh_.end());
    address_of_.assign(is_steady_class_.size(), nullptr);
    const void* last = nullptr;
    int last_class = -1;
    for (const auto& [address, memory] : fresh_) {
      if (address == last && memory != last_class) return false;
      auto& known = address_of_[static_cast<size_t>(memory)];
      if (known != nullptr && known != address) return false;
      known = last = address;
      last_class = memory;
    }
    return true;
  }

  bool learn() {
    steady_.clear();
    is_steady_class_.assign(is_steady_class_.size(), false);
    std::unordered_map<int, const void*> address_of;
    bool holds = true;
    for (const auto& input : inputs_) {
      if (!input.is_steady) continue;
      holds = steady_.try_emplace(input.seen, input.memory).first->second == input.memory && holds;
      holds = address_of.try_emplace(input.memory, input.seen).first->second == input.seen && holds;
      is_steady_class_[static_cast<size_t>(input.memory)] = true;
    }
    if (!holds) steady_.clear();
    return holds;
  }

  std::vector<Input> inputs_;
  size_t at_ = 0;
  bool is_known_ = false;
  std::unordered_map<const void*, int> steady_;  // of steady inputs: address -> class
  std::vector<char> is_steady_class_;
  std::vector<std::pair<const void*, int>> fresh_;  // address and class of the others that share no steady storage
  std::vector<const void*> address_of_;             // by class
};

}  // namespace hocket
