// Ctrl-C is delayed while a step is incomplete.
//
// Between the first op of a planned step and its last written gradient, a KeyboardInterrupt would leave a state that is
// neither before nor after a step. During a hold, SIGINT is only recorded; the release raises it again. A second SIGINT
// within one hold is passed on at once. A hold takes two system calls, under a microsecond; Python's `signal.signal` takes
// six, and works only in the main thread.

#include "bindings.h"

#include <csignal>
#include <mutex>

namespace {

std::mutex lock;
int holds = 0;
struct sigaction usual {};
volatile std::sig_atomic_t noted = 0;

void note(int number, siginfo_t* info, void* context) {
  if (noted == 0) {
    noted = 1;
    return;
  }
  if (usual.sa_flags & SA_SIGINFO) {
    usual.sa_sigaction(number, info, context);
  } else {
    usual.sa_handler(number);
  }
}

void release();

// False if SIGINT is ignored or has the default action: then there is nothing to delay.
bool hold_unchecked() {
  const std::lock_guard<std::mutex> guard(lock);
  if (holds == 0) {
    struct sigaction now {};
    if (sigaction(SIGINT, nullptr, &now) != 0) return false;
    if (!(now.sa_flags & SA_SIGINFO) && (now.sa_handler == SIG_IGN || now.sa_handler == SIG_DFL)) return false;
    usual = now;
    noted = 0;
    struct sigaction ours {};
    ours.sa_sigaction = note;
    ours.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGINT, &ours, nullptr) != 0) return false;
  }
  holds++;
  return true;
}

void release() {
  const std::lock_guard<std::mutex> guard(lock);
  if (holds == 0 || --holds > 0) return;
  struct sigaction now {};
  // A handler that was set meanwhile stays.
  if (sigaction(SIGINT, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == note)
    sigaction(SIGINT, &usual, nullptr);
  if (noted != 0) raise(SIGINT);
  noted = 0;
}

// A SIGINT just before the hold is raised here, and then nothing is held.
bool hold() {
  const bool held = hold_unchecked();
  if (PyErr_CheckSignals() != 0) {
    if (held) release();
    throw pybind11::error_already_set();
  }
  return held;
}

}  // namespace

namespace hocket {

void bind_interrupts(pybind11::module& module) {
  module.def("hold_interrupts", &hold);
  module.def("release_interrupts", &release);
}

}  // namespace hocket
