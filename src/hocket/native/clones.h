// Functions that are compiled for several processors, of which the one that runs takes the best.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// By what a processor can do: `arch=haswell` is that very processor, and neither a newer one nor one of AMD's.
#define HOCKET_TARGETS target_clones("avx512f", "fma", "default"),
#define HOCKET_WITH(features) __attribute__((target(features), optimize("O3", "no-math-errno", "fp-contract=off")))
#else
#define HOCKET_TARGETS
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define HOCKET_CLONES __attribute__((HOCKET_TARGETS optimize("O3")))
#define HOCKET_ROUNDED __attribute__((HOCKET_TARGETS optimize("O3", "no-math-errno", "fp-contract=off")))  // each op
#define HOCKET_APART _Pragma("GCC ivdep")  // what the loop writes, it does not read by another name
#else
#define HOCKET_CLONES
#define HOCKET_ROUNDED
#define HOCKET_APART
#endif
