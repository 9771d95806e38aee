// Macros for functions that are compiled for several instruction sets; the best one for the processor is called.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// By feature, since `arch=haswell` matches that processor only: neither newer ones nor AMD's.
#define HOCKET_TARGETS target_clones("avx512f", "fma", "default"),
#define HOCKET_WITH(features) __attribute__((target(features), optimize("O3", "no-math-errno", "fp-contract=off")))
#else
#define HOCKET_TARGETS
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define HOCKET_CLONES __attribute__((HOCKET_TARGETS optimize("O3")))
#define HOCKET_ROUNDED __attribute__((HOCKET_TARGETS optimize("O3", "no-math-errno", "fp-contract=off")))  // each op
#define HOCKET_APART _Pragma("GCC ivdep")  // no pointer of the loop aliases the one that it writes
#else
#define HOCKET_CLONES
#define HOCKET_ROUNDED
#define HOCKET_APART
#endif
