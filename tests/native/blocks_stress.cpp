// Threads that take, fill, check and give back blocks of `LargeBlocks` at random, while free pages are released.
//
//   blocks_stress THREADS ROUNDS SEED
//
// Exits with 1, and says why, where a block is not aligned, overlaps another one, lies outside the range, or where all
// that was given back does not join to one free piece.

#include "large_blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr size_t kRangeBytes = size_t{1} << 26;
constexpr size_t kGuardBytes = 1 << 16;

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::_Exit(1);
}

struct Block {
  uint64_t* words;
  size_t num_words;
  uint64_t mark;
};

void use(hocket::LargeBlocks& blocks, int rounds, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<Block> held;
  for (int round = 0; round < rounds; ++round) {
    if (held.size() < 12 && random() % 5 < 3) {
      const size_t num_words = 1 + random() % (size_t{1} << (10 + random() % 8));
      auto* words = static_cast<uint64_t*>(blocks.take(num_words * 8));
      if (words == nullptr) continue;  // the range is used up
      if (reinterpret_cast<uintptr_t>(words) % 64 != 0) fail("a block is not aligned for vector loads");
      if (!blocks.owns(words) || !blocks.owns(words + num_words - 1)) fail("a block lies outside of the range");
      const uint64_t mark = random();
      std::fill(words, words + num_words, mark);
      held.push_back({words, num_words, mark});
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      const Block block = held.back();
      held.pop_back();
      if (std::any_of(block.words, block.words + block.num_words, [&](uint64_t word) { return word != block.mark; }))
        fail("a block was written to by somebody else");
      blocks.give_back(block.words);
    }
    if (random() % 64 == 0) blocks.release();
  }
  for (const Block& block : held) blocks.give_back(block.words);
}

}  // namespace

int main(int, char** arguments) {
  const int num_threads = std::atoi(arguments[1]), rounds = std::atoi(arguments[2]);
  const auto seed = static_cast<unsigned>(std::atoi(arguments[3]));
  void* made = mmap(nullptr, kRangeBytes + kGuardBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) fail("no memory");
  auto* range = static_cast<char*>(made);
  hocket::LargeBlocks blocks;
  blocks.open(range, kRangeBytes);
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) threads.emplace_back([&, i] { use(blocks, rounds, seed + i); });
  for (auto& thread : threads) thread.join();
  const size_t cut_bytes = blocks.size_bytes();
  void* whole = blocks.take(cut_bytes - hocket::LargeBlocks::kHeader);
  if (whole == nullptr || blocks.size_bytes() != cut_bytes) fail("what was given back has not joined");
  // The whole range, cut once more: nothing behind its end may be written.
  blocks.give_back(whole);
  whole = blocks.take(kRangeBytes - hocket::LargeBlocks::kHeader);
  if (whole == nullptr) fail("the range cannot be taken whole");
  blocks.give_back(whole);
  if (blocks.take(hocket::LargeBlocks::kPage) == nullptr) fail("nothing can be cut from the whole range");
  if (std::any_of(range + kRangeBytes, range + kRangeBytes + kGuardBytes, [](char byte) { return byte != 0; }))
    fail("something was written behind the range");
  return 0;
}
