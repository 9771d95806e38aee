// Large blocks of the lanes' memory: best fit, split and joined again.
//
// With size classes, a block serves only requests of about its own size, and the peaks of all classes add up: a step of a
// ResNet held 1.5 times the memory of its tensors. So a large block is cut from the smallest free piece that is large
// enough, and a freed piece is joined with its free neighbours:
//
//   | used | free 3 | used | free 5 |        take 2 -->  | used | used 2 | free 1 | used | free 5 |
//   | used | free 3 | used | free 5 |        give back the second used one -->  | used |      free      |
//
// (Knuth, The Art of Computer Programming, vol. 1, section 2.5: boundary tags.) Pieces are pages, so that the memory of
// free ones can go back to the system.

#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

namespace hocket {

class LargeBlocks {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kHeader = 64;  // before each block, which stays aligned for vector loads

  // The range of addresses to cut blocks from; page-aligned.
  void open(char* range, size_t range_bytes) {
    range_ = range;
    range_bytes_ = range_bytes;
  }

  bool owns(const void* block) const {
    auto* address = static_cast<const char*>(block);
    return address >= range_ && address < range_ + range_bytes_;
  }

  // Null when the range is used up.
  void* take(size_t size_bytes) {
    const size_t wanted = (size_bytes + kHeader + kPage - 1) / kPage * kPage;
    const std::lock_guard<std::mutex> locked(guard_);
    auto found = free_.lower_bound({wanted, nullptr});
    Tag* piece;
    if (found != free_.end()) {
      piece = found->second;
      free_.erase(found);
    } else {
      piece = extend(wanted);
      if (piece == nullptr) return nullptr;
    }
    if (piece->size_bytes > wanted) {
      Tag* rest = new (reinterpret_cast<char*>(piece) + wanted) Tag{piece->size_bytes - wanted, wanted, true};
      if (last_ == piece) last_ = rest;  // first: behind the last piece there is no tag to write
      if (char* next = after(rest)) reinterpret_cast<Tag*>(next)->before_bytes = rest->size_bytes;
      piece->size_bytes = wanted;
      free_.insert({rest->size_bytes, rest});
    }
    piece->free = false;
    return reinterpret_cast<char*>(piece) + kHeader;
  }

  void give_back(void* block) {
    const std::lock_guard<std::mutex> locked(guard_);
    Tag* piece = reinterpret_cast<Tag*>(static_cast<char*>(block) - kHeader);
    piece->free = true;
    if (piece->before_bytes != 0) {
      Tag* before = reinterpret_cast<Tag*>(reinterpret_cast<char*>(piece) - piece->before_bytes);
      if (before->free) {
        free_.erase({before->size_bytes, before});
        join(before, piece);
        piece = before;
      }
    }
    if (char* next = after(piece)) {
      Tag* behind = reinterpret_cast<Tag*>(next);
      if (behind->free) {
        free_.erase({behind->size_bytes, behind});
        join(piece, behind);
      }
    }
    free_.insert({piece->size_bytes, piece});
  }

  // Return the pages of free pieces to the system, except the page with the tag.
  void release() {
    const std::lock_guard<std::mutex> locked(guard_);
    for (const auto& [size_bytes, piece] : free_) {
      if (size_bytes > kPage) madvise(reinterpret_cast<char*>(piece) + kPage, size_bytes - kPage, MADV_DONTNEED);
    }
  }

  // Bytes of the range that have been cut so far, in use or free.
  size_t size_bytes() {
    const std::lock_guard<std::mutex> locked(guard_);
    return end_bytes_;
  }

 private:
  struct alignas(kHeader) Tag {
    size_t size_bytes;    // the header included
    size_t before_bytes;  // of the piece before it; 0: it is the first
    bool free;
  };

  // The address behind a piece, or null behind the last.
  char* after(Tag* piece) const {
    return piece == last_ ? nullptr : reinterpret_cast<char*>(piece) + piece->size_bytes;
  }

  void join(Tag* piece, Tag* behind) {
    if (behind == last_) last_ = piece;
    piece->size_bytes += behind->size_bytes;
    if (char* next = after(piece)) reinterpret_cast<Tag*>(next)->before_bytes = piece->size_bytes;
  }

  // A free piece of at least that size at the range's end, out of the last one if that is free.
  Tag* extend(size_t wanted) {
    const bool grows = last_ != nullptr && last_->free;
    const size_t more = wanted - (grows ? last_->size_bytes : 0);
    if (more > range_bytes_ - end_bytes_) return nullptr;
    Tag* piece;
    if (grows) {
      piece = last_;
      free_.erase({piece->size_bytes, piece});
      piece->size_bytes = wanted;
    } else {
      piece = new (range_ + end_bytes_) Tag{wanted, last_ == nullptr ? 0 : last_->size_bytes, true};
      last_ = piece;
    }
    end_bytes_ += more;
    return piece;
  }

  std::mutex guard_;
  std::set<std::pair<size_t, Tag*>> free_;
  char* range_ = nullptr;
  size_t range_bytes_ = 0;
  size_t end_bytes_ = 0;
  Tag* last_ = nullptr;
};

}  // namespace hocket
