// Allreduce over MPI for ranks on several hosts, which wait for the network without a core.
//
// A large buffer is cut into pieces, and each piece into one part for each rank of a host:
//   1. The ranks of a host send each other the parts, and each rank adds up its own part.
//   2. The ranks with the same part, one on each host, add it up around a ring of the hosts.
//   3. The ranks of a host send each other the sums.
// So 2 (n-1)/n of the buffer's bytes leave each of n hosts, however many ranks it has. Several pieces
// are under way at a time: neither the latency of the network nor the additions leave it idle.
//
// The ranks add a small buffer up in pairs, in as few steps as there are doublings of their number.
//
// Additions have a fixed order, so the result is the same on all ranks and in every run.

#ifndef HOROVOD_MPI_BETWEEN_HOSTS_H
#define HOROVOD_MPI_BETWEEN_HOSTS_H

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "mpi.h"

#include "../patience.h"

namespace horovod {
namespace common {
namespace between_hosts {

// A buffer is large from this size on, and if each of the ranks' parts has so many bytes. With smaller
// ones MPI_Allreduce takes as long, or less.
constexpr int64_t LARGE_BYTES = 256 << 10;
constexpr int64_t LARGE_PART_BYTES = 32 << 10;
// What the network could send in the time that one more step of a reduction takes.
constexpr int64_t STEP_BYTES = 16 << 10;
// What a rank sends to the next host in one message, and how many of these may be under way.
constexpr int64_t LEAST_MESSAGE_BYTES = 64 << 10;
constexpr int64_t MOST_MESSAGE_BYTES = 1 << 20;
constexpr int64_t PIECES_UNDER_WAY = 8;
// Of the memory of each of them, what the next call finds there.
constexpr size_t MOST_KEPT_BYTES = 8 << 20;

inline void Check(int code) {
  if (code != MPI_SUCCESS) {
    throw std::runtime_error("an allreduce between hosts failed, see MPI output for details.");
  }
}

inline bool IsLarge(int64_t bytes, int ranks) {
  return bytes >= std::max(LARGE_BYTES, ranks * LARGE_PART_BYTES);
}

// What is the same for all pieces.
struct Plan {
  MPI_Comm local; // the ranks of this host
  MPI_Comm cross; // the ranks of all hosts that have this one's local rank
  MPI_Datatype type;
  MPI_Op op;
  int64_t element; // bytes
  int local_rank, local_size, host, hosts;
};

// Where the part with a number begins, if `count` elements are split into `parts`.
inline int64_t Start(int64_t count, int number, int parts) { return count * number / parts; }

class Piece {
public:
  // Begin a piece of `count` elements: `data` becomes the sums of what is at `from` on all ranks.
  void Begin(const Plan& plan, const uint8_t* from, uint8_t* data, int64_t count, int tag) {
    if (from != data) {
      std::memcpy(data, from, count * plan.element);
    }
    plan_ = &plan;
    data_ = data;
    count_ = count;
    tag_ = tag;
    own_ = Part(plan.local_rank);
    own_count_ = PartCount(plan.local_rank);
    received_.resize(std::max<int64_t>(1, plan.local_size - 1) *
                     (count / plan.local_size + 1) * plan.element);
    step_ = 0;
    stage_ = LOCAL_SUM;
    SendPartsAndReceiveOwn();
  }

  bool Done() const { return stage_ == DONE; }

  // Frees memory that smaller pieces do not need.
  void Trim() {
    if (received_.size() > MOST_KEPT_BYTES) {
      std::vector<uint8_t>().swap(received_);
    }
  }

  // Take the steps that are possible without waiting; returns whether there was one.
  bool Advance() {
    int complete = 0;
    Check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete,
                      MPI_STATUSES_IGNORE));
    if (!complete) {
      return false;
    }
    requests_.clear();
    switch (stage_) {
    case LOCAL_SUM:
      for (int other = 0; other < plan_->local_size - 1; ++other) {
        Add(received_.data() + other * own_count_ * plan_->element, own_, own_count_);
      }
      stage_ = RING;
      SendAndReceiveBlock();
      break;
    case RING:
      if (step_ < plan_->hosts - 1) {
        Add(received_.data(), Block(ReceivedBlock()), BlockCount(ReceivedBlock()));
      }
      if (++step_ < 2 * (plan_->hosts - 1)) {
        SendAndReceiveBlock();
      } else {
        stage_ = LOCAL_COPY;
        SendOwnAndReceiveParts();
      }
      break;
    case LOCAL_COPY:
      stage_ = DONE;
      break;
    case DONE:
      return false;
    }
    return true;
  }

private:
  enum Stage { LOCAL_SUM, RING, LOCAL_COPY, DONE };

  uint8_t* Part(int rank) const {
    return data_ + Start(count_, rank, plan_->local_size) * plan_->element;
  }
  int64_t PartCount(int rank) const {
    return Start(count_, rank + 1, plan_->local_size) - Start(count_, rank, plan_->local_size);
  }
  uint8_t* Block(int number) const {
    return own_ + Start(own_count_, number, plan_->hosts) * plan_->element;
  }
  int64_t BlockCount(int number) const {
    return Start(own_count_, number + 1, plan_->hosts) - Start(own_count_, number, plan_->hosts);
  }
  int SentBlock() const { return (plan_->host - step_ + 2 * plan_->hosts) % plan_->hosts; }
  int ReceivedBlock() const { return (plan_->host - step_ - 1 + 2 * plan_->hosts) % plan_->hosts; }

  void Send(const uint8_t* from, int64_t count, int rank, MPI_Comm comm) {
    requests_.emplace_back();
    Check(MPI_Isend(from, static_cast<int>(count), plan_->type, rank, tag_, comm,
                    &requests_.back()));
  }
  void Receive(uint8_t* to, int64_t count, int rank, MPI_Comm comm) {
    requests_.emplace_back();
    Check(MPI_Irecv(to, static_cast<int>(count), plan_->type, rank, tag_, comm,
                    &requests_.back()));
  }
  void Add(const uint8_t* from, uint8_t* to, int64_t count) {
    Check(MPI_Reduce_local(from, to, static_cast<int>(count), plan_->type, plan_->op));
  }

  void SendPartsAndReceiveOwn() {
    int64_t place = 0;
    for (int rank = 0; rank < plan_->local_size; ++rank) {
      if (rank != plan_->local_rank) {
        Receive(received_.data() + place, own_count_, rank, plan_->local);
        Send(Part(rank), PartCount(rank), rank, plan_->local);
        place += own_count_ * plan_->element;
      }
    }
  }
  void SendAndReceiveBlock() {
    const bool adds = step_ < plan_->hosts - 1;
    const int previous = (plan_->host + plan_->hosts - 1) % plan_->hosts;
    Receive(adds ? received_.data() : Block(ReceivedBlock()), BlockCount(ReceivedBlock()), previous,
            plan_->cross);
    Send(Block(SentBlock()), BlockCount(SentBlock()), (plan_->host + 1) % plan_->hosts,
         plan_->cross);
  }
  void SendOwnAndReceiveParts() {
    for (int rank = 0; rank < plan_->local_size; ++rank) {
      if (rank != plan_->local_rank) {
        Receive(Part(rank), PartCount(rank), rank, plan_->local);
        Send(own_, own_count_, rank, plan_->local);
      }
    }
  }

  const Plan* plan_ = nullptr;
  uint8_t *data_ = nullptr, *own_ = nullptr;
  int64_t count_ = 0, own_count_ = 0;
  int tag_ = 0, step_ = 0;
  Stage stage_ = DONE;
  std::vector<MPI_Request> requests_;
  std::vector<uint8_t> received_; // from others, to be added
};

// Waits for the network without keeping a core busy.
class Patience {
public:
  void Wait() {
    using namespace std::chrono;
    const auto now = steady_clock::now();
    if (!waiting_) {
      waiting_ = true;
      since_ = now;
    }
    const auto waited = duration_cast<microseconds>(now - since_);
    if (waited < microseconds(50)) {
      std::this_thread::yield();
    } else {
      SleepPatiently(waited, microseconds(50));
    }
  }
  void End() { waiting_ = false; }

private:
  bool waiting_ = false;
  std::chrono::steady_clock::time_point since_;
};

// A blocking call of MPI that waits with patience if the ranks are on several hosts. There `start` is
// called, the nonblocking form of `call`.
template <typename Set, typename Blocking, typename Nonblocking>
auto Call(const Set& process_set, Blocking call, Nonblocking start) {
  const auto& controller = *process_set.controller;
  const bool several_hosts = controller.GetSize() > controller.GetLocalSize();
  return [=](auto... arguments) {
    if (!several_hosts) {
      return call(arguments...);
    }
    MPI_Request request;
    int code = start(arguments..., &request);
    Patience patience;
    for (int done = 0; code == MPI_SUCCESS;) {
      code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done) {
        break;
      }
      patience.Wait();
    }
    return code;
  };
}

// A reduction of a small buffer over all ranks, in place.
class Small {
public:
  Small(void* data, int count, int64_t element, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
      : data_(data), count_(count), type_(type), op_(op), comm_(comm) {
    int size = 1;
    Check(MPI_Comm_rank(comm, &rank_));
    Check(MPI_Comm_size(comm, &size));
    if (IsQuickerInPairs(count * element, size)) {
      received_.resize(count * element);
      PlanPairs(size);
      Start();
    } else {
      requests_.emplace_back();
      Check(MPI_Iallreduce(MPI_IN_PLACE, data, count, type, op, comm, &requests_.back()));
    }
  }

  // Take the steps that are possible without waiting; returns whether the sums are there.
  bool Advance() {
    for (;;) {
      int complete = 0;
      Check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete,
                        MPI_STATUSES_IGNORE));
      if (!complete) {
        return false;
      }
      requests_.clear();
      if (step_ >= steps_.size()) {
        return true;
      }
      if (steps_[step_].adds) {
        Add(steps_[step_].source);
      }
      ++step_;
      Start();
    }
  }

private:
  // What is sent to a rank and received from one, at the same time. Negative: nothing.
  struct Step {
    int target, source;
    bool adds; // else what is received takes the place of the sums
  };

  // From 2 KB on MPI_Allreduce sends 2 (n-1)/n of the bytes in two steps for each doubling of n ranks.
  // Pairs send all of them, in one step.
  static bool IsQuickerInPairs(int64_t bytes, int size) {
    const double steps = std::log2(size);
    return bytes * (steps - 2.0 * (size - 1) / size) <= steps * STEP_BYTES;
  }

  // Ranks beyond a power of two first give what they have to a neighbour, and get the sums at last.
  void PlanPairs(int size) {
    int doubled = 1;
    while (2 * doubled <= size) {
      doubled *= 2;
    }
    const int rest = size - doubled;
    const auto rank_of = [rest](int number) { return number < rest ? 2 * number + 1 : number + rest; };
    const bool has_neighbour = rank_ < 2 * rest;
    if (has_neighbour && rank_ % 2 == 0) {
      steps_ = {{rank_ + 1, -1, false}, {-1, rank_ + 1, false}};
      return;
    }
    if (has_neighbour) {
      steps_.push_back({-1, rank_ - 1, true});
    }
    const int number = has_neighbour ? rank_ / 2 : rank_ - rest;
    for (int distance = 1; distance < doubled; distance *= 2) {
      const int other = rank_of(number ^ distance);
      steps_.push_back({other, other, true});
    }
    if (has_neighbour) {
      steps_.push_back({rank_ - 1, -1, false});
    }
  }

  void Start() {
    if (step_ >= steps_.size()) {
      return;
    }
    const Step& step = steps_[step_];
    if (step.source >= 0) {
      requests_.emplace_back();
      Check(MPI_Irecv(step.adds ? received_.data() : data_, count_, type_, step.source, 0, comm_,
                      &requests_.back()));
    }
    if (step.target >= 0) {
      requests_.emplace_back();
      Check(MPI_Isend(data_, count_, type_, step.target, 0, comm_, &requests_.back()));
    }
  }

  // In the order of the ranks: NaN may make a difference.
  void Add(int source) {
    if (source < rank_) {
      Check(MPI_Reduce_local(received_.data(), data_, count_, type_, op_));
    } else {
      Check(MPI_Reduce_local(data_, received_.data(), count_, type_, op_));
      std::memcpy(data_, received_.data(), received_.size());
    }
  }

  void* const data_;
  const int count_;
  const MPI_Datatype type_;
  const MPI_Op op_;
  const MPI_Comm comm_;
  int rank_ = 0;
  std::vector<Step> steps_;
  size_t step_ = 0;
  std::vector<MPI_Request> requests_;
  std::vector<uint8_t> received_;
};

// Reduce a small buffer over all ranks; `from` may be MPI_IN_PLACE.
inline int AllreduceSmall(const void* from, void* buffer, int count, MPI_Datatype type, MPI_Op op,
                          MPI_Comm comm) {
  int element = 0;
  Check(MPI_Type_size(type, &element));
  if (from != MPI_IN_PLACE) {
    std::memcpy(buffer, from, static_cast<int64_t>(count) * element);
  }
  Small sums(buffer, count, element, type, op, comm);
  Patience patience;
  while (!sums.Advance()) {
    patience.Wait();
  }
  return MPI_SUCCESS;
}

// Reductions of large buffers, one after the other. It keeps its memory for the next one.
class Large {
public:
  // Reduce `from` over all ranks into `buffer`, which may be the same memory. Every host must have the
  // same number of ranks. `wait(moved)` is called again and again, with whether anything was sent or
  // received since; if it throws, MPI may still use all memory.
  template <typename Wait>
  void Allreduce(const void* from, void* buffer, int64_t count, int64_t element, MPI_Datatype type,
                 MPI_Op op, MPI_Comm local, MPI_Comm cross, Wait wait) {
    plan_ = {local, cross, type, op, element, 0, 0, 0, 0};
    Check(MPI_Comm_rank(local, &plan_.local_rank));
    Check(MPI_Comm_size(local, &plan_.local_size));
    Check(MPI_Comm_rank(cross, &plan_.host));
    Check(MPI_Comm_size(cross, &plan_.hosts));
    const int64_t messages = int64_t(plan_.local_size) * plan_.hosts;
    const int64_t bytes =
        std::max(LEAST_MESSAGE_BYTES,
                 std::min(MOST_MESSAGE_BYTES, count * element / (messages * PIECES_UNDER_WAY)));
    const int64_t size = bytes / element * messages;
    int64_t begun = 0, done = 0; // pieces
    while (done * size < count) {
      while (begun < done + PIECES_UNDER_WAY && begun * size < count) {
        const int64_t place = begun * size * element;
        pieces_[begun % PIECES_UNDER_WAY].Begin(
            plan_, static_cast<const uint8_t*>(from) + place, static_cast<uint8_t*>(buffer) + place,
            std::min(size, count - begun * size), static_cast<int>(begun % (1 << 15)));
        ++begun;
      }
      bool moved = false;
      for (int64_t each = done; each < begun; ++each) {
        moved |= pieces_[each % PIECES_UNDER_WAY].Advance();
      }
      while (done < begun && pieces_[done % PIECES_UNDER_WAY].Done()) {
        ++done;
      }
      wait(moved);
    }
    for (auto& piece : pieces_) {
      piece.Trim();
    }
  }

private:
  Plan plan_;
  std::vector<Piece> pieces_{static_cast<size_t>(PIECES_UNDER_WAY)};
};

// The same for Horovod's background thread, which alone may call it.
inline void Allreduce(const void* from, void* buffer, int64_t count, int64_t element,
                      MPI_Datatype type, MPI_Op op, MPI_Comm local, MPI_Comm cross) {
  // Never freed: a process may end while this thread is in here.
  static auto& large = *new Large;
  Patience patience;
  large.Allreduce(from, buffer, count, element, type, op, local, cross,
                  [&](bool moved) { moved ? patience.End() : patience.Wait(); });
}

} // namespace between_hosts
} // namespace common
} // namespace horovod

#endif // HOROVOD_MPI_BETWEEN_HOSTS_H
