// Records what the background thread does, for horovod_runner's profile of a run.

#ifndef HOROVOD_ACTIVITY_H
#define HOROVOD_ACTIVITY_H

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace horovod {
namespace common {

// One collective, of one or several fused tensors. Times are nanoseconds of the steady clock.
struct HorovodActivity {
  int64_t sequence = 0; // of this rank: 1, 2, 3, ...
  int64_t number = 0;   // in its process set: the same collective has one number on all ranks
  int64_t bytes = 0;
  int64_t queued = 0;   // when this rank had all tensors; 0 if it contributes none
  int64_t started = 0;  // when all ranks had them
  int64_t ended = 0;    // 0 while it lasts
  int32_t kind = 0;     // Response::ResponseType
  int32_t tensors = 0;
  int32_t process_set = 0;
  int32_t unused = 0;
  char name[64] = {};   // of the tensor that was queued last
};

// Sums since the start of the process; times are nanoseconds.
struct HorovodActivityTotals {
  int64_t count = 0;   // of the collectives that have started
  int64_t waiting = 0; // how long threads were blocked in synchronize before a collective started
  int64_t moving = 0;  // and while one was going on
  int64_t bytes = 0;   // of the collectives that have started
  int64_t waited = 0;  // from queued to started, over all collectives
  int64_t moved = 0;   // from started to ended
  int64_t most = 0;    // how often the tensor was reduced that was reduced most often
};

struct HorovodActivityLog {
  static constexpr int64_t room = 4096;
  std::mutex mutex;
  HorovodActivityTotals totals;
  std::map<int32_t, int64_t> numbers;
  std::unordered_map<std::string, int64_t> names; // of at most `room` tensors
  HorovodActivity records[room];
};

inline HorovodActivityLog& HorovodActivities() {
  // Never freed: other threads may use it until the process has ended.
  static HorovodActivityLog& log = *new HorovodActivityLog;
  return log;
}

inline int64_t HorovodNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Returns the sequence number for HorovodActivityEnded.
inline int64_t HorovodActivityStarted(HorovodActivity activity, const std::string& name,
                                      HorovodActivityLog& log = HorovodActivities()) {
  std::strncpy(activity.name, name.c_str(), sizeof(activity.name) - 1);
  std::lock_guard<std::mutex> guard(log.mutex);
  HorovodActivityTotals& totals = log.totals;
  activity.sequence = ++totals.count;
  activity.number = ++log.numbers[activity.process_set];
  activity.started = HorovodNow();
  totals.bytes += activity.bytes;
  if (activity.queued) {
    totals.waited += std::max<int64_t>(0, activity.started - activity.queued);
  }
  if (log.names.size() < static_cast<size_t>(log.room) || log.names.count(name)) {
    totals.most = std::max(totals.most, ++log.names[name]);
  }
  log.records[activity.sequence % log.room] = activity;
  return activity.sequence;
}

// Called for each tensor: the last one counts.
inline void HorovodActivityEnded(int64_t sequence, HorovodActivityLog& log = HorovodActivities()) {
  std::lock_guard<std::mutex> guard(log.mutex);
  HorovodActivity& activity = log.records[sequence % log.room];
  if (activity.sequence == sequence) {
    const int64_t now = HorovodNow();
    log.totals.moved += now - (activity.ended ? activity.ended : activity.started);
    activity.ended = now;
  }
}

// A thread was blocked until a collective was complete.
inline void HorovodBlocked(int64_t begin, int64_t end) {
  HorovodActivityLog& log = HorovodActivities();
  std::lock_guard<std::mutex> guard(log.mutex);
  int64_t moving = 0;
  const int64_t count = log.totals.count;
  for (int64_t i = count; i > std::max<int64_t>(0, count - log.room); --i) {
    const HorovodActivity& activity = log.records[i % log.room];
    const int64_t ended = activity.ended ? activity.ended : end;
    if (ended <= begin) {
      break;
    }
    moving += std::max<int64_t>(0, std::min(ended, end) - std::max(activity.started, begin));
  }
  moving = std::min(moving, end - begin);
  log.totals.moving += moving;
  log.totals.waiting += end - begin - moving;
}

} // namespace common
} // namespace horovod

#endif // HOROVOD_ACTIVITY_H
