// Elementwise ops of an optimizer's update as one op, with the bits of torch's kernels (see
// hocket/tracing/lowering/chains.py).
//
// An update of Adam is eight ops for each parameter, and for small parameters each takes less time than the dispatcher. A
// chain runs them block by block, while a block is in the cache. Each instruction rounds where torch's kernel does: no
// multiplication and addition are contracted, and a fused one is a separate instruction. Square roots are torch's, whose
// library does not round as IEEE does: their operands are gathered from all tensors, for one call.

#include "clones.h"
#include "ops.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sqrt_cpu_dispatch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

using namespace hocket;

constexpr int64_t kBlock = 512;          // elements
constexpr int64_t kMaxMade = 8;          // values between the instructions of a part

// The order is that of `OPS` in chains.py. Those behind `kNumExact` contract a multiplication and an addition where the
// processor has an instruction for both.
enum Op : int64_t { kMulNumber, kMul, kAddNumber, kAdd, kLerp, kAddMul, kAddDiv, kDivNumber, kDiv, kNeg, kSqrt,
                    kNumExact, kAddFused = kNumExact, kLerpFused, kAddMulFused, kNumOps };

#define HOCKET_EACH(value)                                      \
  {                                                             \
    HOCKET_APART for (int64_t i = 0; i < n; ++i) to[i] = value; \
    break;                                                      \
  }

template <typename T>
inline __attribute__((always_inline)) void exact(int64_t op, T* to, const T* a, const T* b, const T* c, T s, int64_t n) {
  switch (op) {
    case kMulNumber: HOCKET_EACH(a[i] * s)
    case kMul: HOCKET_EACH(a[i] * b[i])
    case kAddNumber: HOCKET_EACH(a[i] + s)
    case kAdd: HOCKET_EACH(a[i] + s * b[i])
    case kLerp:
      if (std::abs(s) < T(0.5)) HOCKET_EACH(a[i] + s * (b[i] - a[i]))
      HOCKET_EACH(b[i] - (b[i] - a[i]) * (T(1) - s))
    case kAddMul: HOCKET_EACH(a[i] + s * b[i] * c[i])
    case kAddDiv: HOCKET_EACH(a[i] + s * b[i] / c[i])
    case kDivNumber: HOCKET_EACH(a[i] / s)
    case kDiv: HOCKET_EACH(a[i] / b[i])
    case kNeg: HOCKET_EACH(-a[i])
  }
}

inline __attribute__((always_inline)) float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline __attribute__((always_inline)) double fma_of(double a, double b, double c) { return __builtin_fma(a, b, c); }

template <typename T>
inline __attribute__((always_inline)) void fused(int64_t op, T* to, const T* a, const T* b, const T* c, T s, int64_t n) {
  switch (op) {
    case kAddFused: HOCKET_EACH(fma_of(s, b[i], a[i]))
    case kLerpFused:
      if (std::abs(s) < T(0.5)) HOCKET_EACH(fma_of(s, b[i] - a[i], a[i]))
      HOCKET_EACH(fma_of(s - T(1), b[i] - a[i], b[i]))
    case kAddMulFused: HOCKET_EACH(fma_of(s * b[i], c[i], a[i]))
  }
}
#undef HOCKET_EACH

#define HOCKET_MADE(name, how, attributes, T)                                                                \
  attributes void name(int64_t op, T* to, const T* a, const T* b, const T* c, T s, int64_t n) {              \
    how(op, to, a, b, c, s, n);                                                                              \
  }
HOCKET_MADE(run_exact, exact, HOCKET_ROUNDED, float)
HOCKET_MADE(run_exact, exact, HOCKET_ROUNDED, double)
HOCKET_MADE(run_fused, fused, , float)
HOCKET_MADE(run_fused, fused, , double)
#if defined(HOCKET_WITH)
// g++ makes no vectors of such a multiplication in one of several clones.
HOCKET_MADE(run_fused_256, fused, HOCKET_WITH("avx2,fma"), float)
HOCKET_MADE(run_fused_256, fused, HOCKET_WITH("avx2,fma"), double)
HOCKET_MADE(run_fused_512, fused, HOCKET_WITH("avx512f,avx2,fma"), float)
HOCKET_MADE(run_fused_512, fused, HOCKET_WITH("avx512f,avx2,fma"), double)
#endif
#undef HOCKET_MADE

template <typename T>
using Function = void (*)(int64_t, T*, const T*, const T*, const T*, T, int64_t);

template <typename T>
Function<T> best_fused() {
#if defined(HOCKET_WITH)
  if (__builtin_cpu_supports("avx512f")) return run_fused_512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return run_fused_256;
#endif
  return run_fused;
}

// Operands are places in the tensors of a part, or -1 - n for the value n that the part makes.
struct Instruction {
  int64_t op, to, a, b, c, number;
};

// Instructions on tensors with one number of elements. A new stage begins after each square root.
struct ChainPart {
  int64_t first_tensor = 0, num_tensors = 0;
  std::vector<std::vector<Instruction>> stages{1};
};

// Some elements of a part. Its roots begin at `root` in a buffer for all spans of one call.
struct Span {
  const ChainPart* part;
  int64_t begin, end, root;
};

struct Chain : torch::CustomClassHolder {
  std::vector<ChainPart> parts;
  std::vector<int64_t> written;  // tensors
  int64_t num_tensors = 0, num_numbers = 0;
  size_t num_stages = 1;

  // For each part the number of its tensors and of its instructions, and these: op, to, a, b, c, number.
  explicit Chain(const std::vector<int64_t>& program) {
    for (size_t at = 0; at < program.size();) {
      TORCH_CHECK(at + 2 <= program.size(), "a chain ends within a part");
      ChainPart part;
      part.first_tensor = num_tensors, part.num_tensors = program[at];
      TORCH_CHECK(part.num_tensors > 0, "a part of a chain has no tensors");
      const int64_t count = program[at + 1];
      at += 2;
      TORCH_CHECK(at + 6 * count <= program.size(), "a chain ends within an instruction");
      num_tensors += part.num_tensors;
      for (int64_t n = 0; n < count; ++n, at += 6) {
        const Instruction one{program[at],     program[at + 1], program[at + 2],
                              program[at + 3], program[at + 4], program[at + 5]};
        TORCH_CHECK(0 <= one.op && one.op < kNumOps, "a chain has no op ", one.op);
        for (const int64_t operand : {one.to, one.a, one.b, one.c})
          TORCH_CHECK(-kMaxMade <= operand && operand < part.num_tensors, "a chain has no operand ", operand);
        num_numbers = std::max(num_numbers, one.number + 1);
        if (one.to >= 0) written.push_back(part.first_tensor + one.to);
        if (one.op == kSqrt) part.stages.emplace_back();
        part.stages.back().push_back(one);
      }
      num_stages = std::max(num_stages, part.stages.size());
      parts.push_back(std::move(part));
    }
    std::sort(written.begin(), written.end());
    written.erase(std::unique(written.begin(), written.end()), written.end());
  }
};

template <typename T>
struct Run {
  const Chain& chain;
  std::vector<T*> data;
  std::vector<T> numbers;
  at::TensorOptions options;
  Function<T> fused = best_fused<T>();

  void make(const std::vector<Span>& spans, int64_t num_roots) const {
    auto roots = chain.num_stages > 1 ? at::empty({num_roots}, options) : at::Tensor();
    for (size_t stage = 0; stage < chain.num_stages; ++stage) {
      if (stage) at::cpu::sqrt_(roots);
      T* of_spans = roots.defined() ? roots.template mutable_data_ptr<T>() : nullptr;
      for (const Span& span : spans)
        if (stage < span.part->stages.size())
          make_stage(*span.part, stage, span.begin, span.end, of_spans ? of_spans + span.root - span.begin : nullptr);
    }
  }

  void make_stage(const ChainPart& part, size_t stage, int64_t begin, int64_t end, T* roots) const {
    alignas(64) T made[kMaxMade][kBlock];
    const Instruction* next = stage + 1 < part.stages.size() ? &part.stages[stage + 1].front() : nullptr;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t size = std::min(kBlock, end - at);
      const auto where = [&](int64_t operand) {
        return operand < 0 ? made[-1 - operand] : data[part.first_tensor + operand] + at;
      };
      for (const Instruction& one : part.stages[stage]) {
        if (one.op == kSqrt) {
          std::copy_n(roots + at, size, where(one.to));
          continue;
        }
        const T number = one.number < 0 ? T(1) : numbers[one.number];
        T *to = where(one.to), *a = where(one.a), *b = where(one.b), *c = where(one.c);
        if (one.op < kNumExact) run_exact(one.op, to, a, b, c, number, size);
        else fused(one.op, to, a, b, c, number, size);
      }
      if (next) std::copy_n(where(next->a), size, roots + at);
    }
  }
};

// Small tensors are made together, large ones by several threads.
template <typename T>
void run_chain(const Chain& chain, at::TensorList tensors, at::ArrayRef<double> numbers) {
  Run<T> run{chain, {}, {numbers.begin(), numbers.end()}, tensors[0].options().requires_grad(false)};
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type() && tensor.is_non_overlapping_and_dense() &&
                    tensor.device().is_cpu(),
                "a chain takes dense tensors of one type");
    run.data.push_back(static_cast<T*>(tensor.data_ptr()));
  }
  std::vector<Span> small;
  int64_t num_small = 0;
  for (const ChainPart& part : chain.parts) {
    const at::Tensor& first = tensors[part.first_tensor];
    const int64_t size = first.numel();
    for (int64_t n = 1; n < part.num_tensors; ++n) {
      const at::Tensor& other = tensors[part.first_tensor + n];
      TORCH_CHECK(other.sizes().equals(first.sizes()) && other.strides().equals(first.strides()),
                  "a part of a chain takes tensors of one layout");
    }
    if (size <= kGrainValues) {
      small.push_back({&part, 0, size, num_small});
      num_small += size;
      continue;
    }
    at::parallel_for(0, size, kGrainValues, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; at += kGrainValues) {
        const int64_t last = std::min(end, at + kGrainValues);
        run.make({{&part, at, last, 0}}, last - at);
      }
    });
  }
  if (!small.empty()) run.make(small, num_small);
}

void update_chain(const c10::intrusive_ptr<Chain>& chain, at::TensorList tensors, at::ArrayRef<double> numbers) {
  TORCH_CHECK(static_cast<int64_t>(tensors.size()) == chain->num_tensors, "a chain of ", chain->num_tensors,
              " tensors was given ", tensors.size());
  TORCH_CHECK(static_cast<int64_t>(numbers.size()) >= chain->num_numbers, "a chain lacks numbers");
  if (tensors.empty()) return;
  keep_width();
  const auto type = tensors[0].scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kDouble, "a chain takes tensors of float32 or float64");
  (type == at::kFloat ? run_chain<float> : run_chain<double>)(*chain, tensors, numbers);
  for (const int64_t place : chain->written)
    if (!tensors[place].is_inference()) tensors[place].unsafeGetTensorImpl()->bump_version();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hocket, library) {
  library.class_<Chain>("Chain").def(torch::init<const std::vector<int64_t>&>());
  library.def("update_chain(__torch__.torch.classes.hocket.Chain chain, Tensor(a!)[] tensors, float[] numbers) -> ()");
}

TORCH_LIBRARY_IMPL(hocket, CompositeImplicitAutograd, library) { library.impl("update_chain", update_chain); }
