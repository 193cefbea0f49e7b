// How threads sleep that test again and again whether other ranks have come.

#ifndef HOROVOD_PATIENCE_H
#define HOROVOD_PATIENCE_H

#include <algorithm>
#include <chrono>
#include <thread>

#include <sys/prctl.h>

namespace horovod {
namespace common {

// Sleeps for a part of the time waited, so that a test comes late by a part of that time at most.
inline void SleepPatiently(std::chrono::microseconds waited, std::chrono::microseconds longest) {
  using std::chrono::microseconds;
  // Linux makes each sleep 50 microseconds longer unless a thread asks for less.
  static thread_local const int precise = prctl(PR_SET_TIMERSLACK, 1000);
  (void)precise;
  std::this_thread::sleep_for(std::min(std::max(waited / 16, microseconds(20)), longest));
}

} // namespace common
} // namespace horovod

#endif // HOROVOD_PATIENCE_H
