// A backend of torch.distributed for tensors in main memory, over MPI. horovod_runner.torch_backend
// makes its groups.
//
// A group has communicators of its own, and a thread that runs its collectives in the order of the
// calls; what a callback of one calls comes next. Before each one the ranks of the group meet in a small
// allreduce. A rank waits for the others asleep there, and calls that differ are found. Messages (send
// and recv) have another thread, which tests them in turn.
//
// All calls of MPI are nonblocking ones that are tested. MPI's own waits call sched_yield, after which
// Linux runs any other process for milliseconds.
//
// It is a module of its own, because another torch may have other headers of c10d. If they do not fit,
// cmake/Modules/attempt.py makes a module that only says why.

#ifdef HOROVOD_RUNNER_MISSING

#include <Python.h>

PyMODINIT_FUNC PyInit_process_group() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "process_group"};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) {
    PyModule_AddStringConstant(module, "missing", HOROVOD_RUNNER_MISSING);
  }
  return module;
}

#else

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#undef LOG
#include "../common/activity.h"
#define OMPI_SKIP_MPICXX
#include "../common/ops/mpi_between_hosts.h"
#include "../common/patience.h"
#include "mpi.h"

namespace horovod {
namespace torch {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using at::Tensor;
using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using StorePointer = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<Tensor>;
namespace between_hosts = common::between_hosts;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// How long a rank tests without a pause. Afterwards the cores are for the ranks' other threads.
constexpr auto kBusy = microseconds(100);
// How long a rank that leaves a group waits for the others.
constexpr auto kLeave = milliseconds(2000);
constexpr int kNameBytes = 128;
// A piece of a large tensor stays in the processor's cache.
constexpr int64_t kPieceBytes = 4 << 20;
constexpr int64_t kExchangeBytes = 1 << 20;
// From this size of a rank's part on, the ranks add the parts here; below, MPI does.
constexpr int64_t kSmallBytes = 8 << 10;
// How many of these a rank exchanges at a time if it does not exchange with one other rank alone.
constexpr int64_t kExchanges = 8;

// The log of Horovod's collectives, which the profile of a run reads. It is in the module mpi_lib_v2.
common::HorovodActivityLog* activities = nullptr;

void Check(int code, const std::string& what) {
  if (code == MPI_SUCCESS) {
    return;
  }
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  int kind = MPI_SUCCESS;
  MPI_Error_class(code, &kind);
  const char* cause = kind == MPI_ERR_TRUNCATE
                          ? ". The ranks' tensors have different sizes"
                          : ". Connection closed by peer, or MPI has no memory left";
  C10_THROW_ERROR(DistBackendError, what + " failed in MPI: " + text + cause);
}

// Calls `test()` until it returns true; without a pause at first, then between sleeps. Returns false once
// `ends(waited)` is true.
template <typename Test, typename Ends> bool Patiently(Test test, microseconds busy, Ends ends) {
  const auto start = Clock::now();
  for (;;) {
    if (test()) {
      return true;
    }
    const auto waited = std::chrono::duration_cast<microseconds>(Clock::now() - start);
    if (waited > busy) {
      if (ends(waited)) {
        return false;
      }
      common::SleepPatiently(waited, microseconds(1000));
    }
  }
}

// The same for a request, which is still active if it returns false.
template <typename Ends>
bool Patiently(MPI_Request& request, microseconds busy, const std::string& what, Ends ends) {
  return Patiently(
      [&] {
        int done = 0;
        Check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
        return done != 0;
      },
      busy, ends);
}

template <typename T, typename Reduce>
void ReduceHalves(void* in, void* inout, int* count, MPI_Datatype*) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(inout);
  for (int i = 0; i < *count; ++i) {
    to[i] = static_cast<T>(Reduce()(static_cast<float>(from[i]), static_cast<float>(to[i])));
  }
}

struct Smaller {
  float operator()(float a, float b) const { return a < b || a != a ? a : b; }
};
struct Larger {
  float operator()(float a, float b) const { return a > b || a != a ? a : b; }
};

// MPI's type and operations for a type of 16 bits that MPI does not know.
struct Halves {
  MPI_Datatype type;
  MPI_Op sum, product, smallest, largest;

  template <typename T> static Halves Make() {
    Halves made;
    MPI_Type_contiguous(2, MPI_BYTE, &made.type);
    MPI_Type_commit(&made.type);
    MPI_Op_create(&ReduceHalves<T, std::plus<float>>, 1, &made.sum);
    MPI_Op_create(&ReduceHalves<T, std::multiplies<float>>, 1, &made.product);
    MPI_Op_create(&ReduceHalves<T, Smaller>, 1, &made.smallest);
    MPI_Op_create(&ReduceHalves<T, Larger>, 1, &made.largest);
    return made;
  }
};

std::atomic<pid_t> initialized_by{0};

void FinalizeMpi() {
  if (initialized_by != getpid()) {
    return; // a process that a rank has forked
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) {
    MPI_Finalize();
  }
}

// MPI in this process. Horovod may have initialized it, or may find it initialized later.
struct World {
  int rank = 0;
  int size = 0;
  int hosts = 1;
  Halves float16;
  Halves bfloat16;
  std::atomic<bool> has_numbered_group{false};

  static World& Get() {
    // Never freed: threads may use it until the process has ended.
    static World& world = *new World;
    return world;
  }

private:
  World() {
    int initialized = 0;
    int threads = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    if (initialized) {
      MPI_Query_thread(&threads);
    } else {
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &threads);
      // A launcher that starts the ranks itself does not need the final wait of the ranks.
      if (std::getenv("HOROVOD_MPI_NO_FINALIZE") == nullptr) {
        initialized_by = getpid();
        std::atexit(FinalizeMpi);
      }
    }
    TORCH_CHECK(threads == MPI_THREAD_MULTIPLE, "The torch.distributed backend hvd needs an MPI "
                "that several threads can call (MPI_THREAD_MULTIPLE), and this one was initialized "
                "with level ", threads, ". Use the backend gloo.");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char* expected = std::getenv("HOROVOD_MPI_WORLD_SIZE");
    TORCH_CHECK(expected == nullptr || size == std::atoi(expected), "MPI found ", size,
                " rank(s) and the job has ", expected == nullptr ? "" : expected,
                ": MPI_Init did not reach what started this process.");
    const char* cross = std::getenv("HOROVOD_CROSS_SIZE");
    hosts = cross == nullptr ? 1 : std::max(1, std::atoi(cross));
    float16 = Halves::Make<at::Half>();
    bfloat16 = Halves::Make<at::BFloat16>();
  }
};

// MPI's type for elements that are moved or reduced; MPI_DATATYPE_NULL if they can only be moved.
MPI_Datatype TypeOf(at::ScalarType type) {
  switch (type) {
  case at::kByte:
  case at::kBool:
    return MPI_UINT8_T;
  case at::kChar:
    return MPI_INT8_T;
  case at::kShort:
    return MPI_INT16_T;
  case at::kInt:
    return MPI_INT32_T;
  case at::kLong:
    return MPI_INT64_T;
  case at::kFloat:
    return MPI_FLOAT;
  case at::kDouble:
    return MPI_DOUBLE;
  case at::kHalf:
    return World::Get().float16.type;
  case at::kBFloat16:
    return World::Get().bfloat16.type;
  default:
    return MPI_DATATYPE_NULL;
  }
}

const char* Reduction(const ReduceOp& op) {
  static const char* const names[] = {"sum", "avg", "product", "min",       "max",
                                      "band", "bor", "bxor",   "premul_sum", "unknown"};
  return names[std::min<int>(op.op_, ReduceOp::UNUSED)];
}

// MPI's operation; MPI_OP_NULL if there is none for the type.
MPI_Op OperationOf(const ReduceOp& op, at::ScalarType type) {
  if (type == at::kHalf || type == at::kBFloat16) {
    const Halves& halves = type == at::kHalf ? World::Get().float16 : World::Get().bfloat16;
    switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
      return halves.sum;
    case ReduceOp::PRODUCT:
      return halves.product;
    case ReduceOp::MIN:
      return halves.smallest;
    case ReduceOp::MAX:
      return halves.largest;
    default:
      return MPI_OP_NULL;
    }
  }
  const bool is_bool = type == at::kBool;
  const bool has_bits = at::isIntegralType(type, true);
  switch (op.op_) {
  case ReduceOp::SUM:
    return is_bool ? MPI_MAX : MPI_SUM;
  case ReduceOp::AVG:
    return is_bool ? MPI_OP_NULL : MPI_SUM;
  case ReduceOp::PREMUL_SUM:
    return has_bits ? MPI_OP_NULL : MPI_SUM;
  case ReduceOp::PRODUCT:
    return is_bool ? MPI_MIN : MPI_PROD;
  case ReduceOp::MIN:
    return MPI_MIN;
  case ReduceOp::MAX:
    return MPI_MAX;
  case ReduceOp::BAND:
    return has_bits ? MPI_BAND : MPI_OP_NULL;
  case ReduceOp::BOR:
    return has_bits ? MPI_BOR : MPI_OP_NULL;
  case ReduceOp::BXOR:
    return has_bits ? MPI_BXOR : MPI_OP_NULL;
  default:
    return MPI_OP_NULL;
  }
}

// The bytes of a contiguous tensor in units for MPI. Complex numbers are pairs of real ones.
struct Buffer {
  char* data;
  int64_t count;
  int64_t unit; // bytes
  at::ScalarType scalar;
  MPI_Datatype type;

  explicit Buffer(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())), count(tensor.numel()),
        unit(tensor.element_size()), scalar(tensor.scalar_type()) {
    if (tensor.is_complex()) {
      scalar = c10::toRealValueType(scalar);
      count *= 2;
      unit /= 2;
    }
    type = TypeOf(scalar);
    if (type == MPI_DATATYPE_NULL) {
      type = MPI_BYTE;
      count *= unit;
      unit = 1;
    }
  }
};

int Count(int64_t count) {
  TORCH_CHECK(count <= INT32_MAX, "The torch.distributed backend hvd sends at most ", INT32_MAX,
              " elements at a time from one rank, and this call has ", count,
              ". Split it.");
  return static_cast<int>(count);
}

std::vector<int> Counts(const std::vector<int64_t>& counts) {
  std::vector<int> found;
  for (auto count : counts) {
    found.push_back(Count(count));
  }
  return found;
}

std::vector<int> Offsets(const std::vector<int>& counts) {
  std::vector<int> found(counts.size(), 0);
  int64_t total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    found[i] = Count(total);
    total += counts[i];
  }
  return found;
}

// A piece that is sent to a rank, and one that is received from another and has to be added.
struct Exchange {
  MPI_Request sending = MPI_REQUEST_NULL, receiving = MPI_REQUEST_NULL;
  char *received, *target;
  int count; // of elements to add
};

// The ranks of a group, once all of them are in the same call. Tensors are contiguous.
struct Peers {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  int64_t piece = kPieceBytes; // bytes of a tensor that are reduced at a time
  // With more than two ranks, or several hosts, large tensors go through a pipeline: through the ranks of
  // this host, and around a ring of those with its local rank; or around a ring of all ranks.
  MPI_Comm local = MPI_COMM_NULL, cross = MPI_COMM_NULL;
  int local_size = 1;
  bool are_in_order = false; // the ranks of the first host have the lowest numbers, and so on
  std::shared_ptr<between_hosts::Large> large;
  Tensor exchanged;
  bool is_awaited = true;                 // a thread waits for the call
  std::function<bool(microseconds)> ends; // whether to give up after this time
  Tensors kept;                           // MPI may write there as long as the call lasts

  // Starts a call of MPI by `start(request)`, and waits for it. Pauses of one rank keep others waiting.
  // There are none while the bytes may be moving, at 1 GB/s or more, if nothing else is to be computed.
  template <typename Start> void Do(const char* what, int64_t bytes, Start start) const {
    MPI_Request request;
    Check(start(&request), what);
    Finish(what, bytes, request);
  }

  void Finish(const char* what, int64_t bytes, MPI_Request request) const {
    if (!Patiently(request, is_awaited ? kBusy + microseconds(bytes / 1000) : kBusy, what, ends)) {
      GiveUp(what);
    }
  }

  [[noreturn]] static void GiveUp(const char* what) {
    C10_THROW_ERROR(DistBackendError, std::string("Timed out waiting for the data of other ranks in ") +
                                          what + ". Connection closed by peer, or it is frozen");
  }

  bool HasPipeline() const { return cross != MPI_COMM_NULL; }

  Tensor Temporary(at::IntArrayRef sizes, const at::TensorOptions& options) {
    kept.push_back(at::empty(sizes, options));
    return kept.back();
  }

  // The tensor times the factor of PREMUL_SUM, which each rank has its own of. A half's part of an
  // average: the sum of all may be too large for its type.
  Tensor Multiplied(const Tensor& tensor, const ReduceOp& op) {
    if (op.op_ == ReduceOp::AVG && at::isReducedFloatingType(tensor.scalar_type())) {
      kept.push_back(tensor / size);
      return kept.back();
    }
    if (op.op_ != ReduceOp::PREMUL_SUM) {
      return tensor;
    }
    const auto* given = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    kept.push_back(tensor * (given->tensor_factor.defined() ? given->tensor_factor.item<double>()
                                                            : given->double_factor));
    return kept.back();
  }

  // Makes an average of a sum, but for halves.
  void Scale(const Buffer& buffer, int64_t from, int64_t count, const ReduceOp& op) const {
    if (op.op_ != ReduceOp::AVG || at::isReducedFloatingType(buffer.scalar)) {
      return;
    }
    auto part = at::from_blob(buffer.data + from * buffer.unit, {count},
                              at::TensorOptions().dtype(buffer.scalar));
    if (at::isIntegralType(buffer.scalar, true)) {
      part.div_(size, "trunc");
    } else {
      part.div_(size);
    }
  }

  template <typename Do> void InPieces(const Buffer& buffer, Do act) const {
    const int64_t most = std::max<int64_t>(1, piece / buffer.unit);
    for (int64_t from = 0; from < buffer.count; from += most) {
      act(buffer.data + from * buffer.unit, from, std::min(most, buffer.count - from));
    }
  }

  void Allreduce(const Tensor& tensor, const ReduceOp& op) {
    const Tensor own = Multiplied(tensor, op);
    if (!own.is_same(tensor)) {
      tensor.copy_(own);
    }
    const Buffer buffer(tensor);
    const MPI_Op operation = OperationOf(op, buffer.scalar);
    if (HasPipeline() && buffer.count) {
      AllreduceInPipeline(buffer, operation);
      Scale(buffer, 0, buffer.count, op);
      return;
    }
    InPieces(buffer, [&](char* data, int64_t from, int64_t count) {
      const int64_t bytes = count * buffer.unit;
      if (size > 1 && bytes / size >= kSmallBytes) {
        AllreduceInParts(buffer, from, count, operation, op);
        return;
      }
      Do("all_reduce", bytes, [&](MPI_Request* request) {
        return MPI_Iallreduce(MPI_IN_PLACE, data, Count(count), buffer.type, operation, comm,
                              request);
      });
      Scale(buffer, from, count, op);
    });
  }

  void AllreduceInPipeline(const Buffer& buffer, MPI_Op operation) {
    const int64_t bytes = buffer.count * buffer.unit;
    try {
      if (!between_hosts::IsLarge(bytes, size)) {
        auto* sums = new between_hosts::Small(buffer.data, Count(buffer.count), buffer.unit,
                                              buffer.type, operation, comm);
        if (!Patiently([&] { return sums->Advance(); }, kBusy, ends)) {
          GiveUp("all_reduce");
        }
        delete sums; // not after an error: MPI may still write there
        return;
      }
      between_hosts::Patience patience;
      auto moved_at = Clock::now();
      large->Allreduce(buffer.data, buffer.data, buffer.count, buffer.unit, buffer.type, operation,
                       local, cross, [&](bool moved) {
                         if (moved) {
                           patience.End();
                           moved_at = Clock::now();
                           return;
                         }
                         patience.Wait();
                         if (ends(std::chrono::duration_cast<microseconds>(Clock::now() - moved_at))) {
                           GiveUp("all_reduce");
                         }
                       });
    } catch (const std::runtime_error& error) {
      C10_THROW_ERROR(DistBackendError, std::string("all_reduce failed in MPI: ") + error.what() +
                                            ". Connection closed by peer, or MPI has no memory left");
    }
  }

  // Each rank adds one part, and sends it to the others.
  void AllreduceInParts(const Buffer& buffer, int64_t from, int64_t count, MPI_Op operation,
                        const ReduceOp& op) {
    char* data = buffer.data + from * buffer.unit;
    std::vector<int> counts;
    for (int i = 0; i < size; ++i) {
      counts.push_back(Count(count * (i + 1) / size - count * i / size));
    }
    const auto offsets = Offsets(counts);
    char* own = data + offsets[rank] * buffer.unit;
    AddParts("all_reduce", buffer, data, own, {counts.begin(), counts.end()}, operation);
    Scale(buffer, from + offsets[rank], counts[rank], op);
    for (int step = 1; step < size; ++step) {
      const int source = (rank - step + size) % size;
      MPI_Request sending;
      Check(MPI_Isend(own, counts[rank], buffer.type, (rank + step) % size, 0, comm, &sending),
            "all_reduce");
      Do("all_reduce", count * buffer.unit, [&](MPI_Request* request) {
        return MPI_Irecv(data + offsets[source] * buffer.unit, counts[source], buffer.type, source,
                         0, comm, request);
      });
      Finish("all_reduce", count * buffer.unit, sending);
    }
  }

  void Reduce(const Tensor& tensor, const ReduceOp& op, int root) {
    const Tensor own = Multiplied(tensor, op);
    if (rank == root && !own.is_same(tensor)) {
      tensor.copy_(own);
    }
    const Buffer buffer(rank == root ? tensor : own);
    const MPI_Op operation = OperationOf(op, buffer.scalar);
    InPieces(buffer, [&](char* data, int64_t from, int64_t count) {
      const bool here = rank == root;
      Do("reduce", count * buffer.unit, [&](MPI_Request* request) {
        return MPI_Ireduce(here ? MPI_IN_PLACE : data, here ? data : nullptr, Count(count),
                           buffer.type, operation, root, comm, request);
      });
      if (here) {
        Scale(buffer, from, count, op);
      }
    });
  }

  void Broadcast(const Tensor& tensor, int root) const {
    const Buffer buffer(tensor);
    InPieces(buffer, [&](char* data, int64_t, int64_t count) {
      Do("broadcast", count * buffer.unit, [&](MPI_Request* request) {
        return MPI_Ibcast(data, Count(count), buffer.type, root, comm, request);
      });
    });
  }

  // `out` has the parts of all ranks one after the other, and may contain `in` at its place.
  void Allgather(const Tensor& in, const Tensor& out, const std::vector<int64_t>& elements) {
    const Buffer from(in), to(out);
    const int64_t units = out.numel() ? to.count / out.numel() : 1;
    std::vector<int64_t> sizes;
    for (auto count : elements) {
      sizes.push_back(count * units);
    }
    const auto counts = Counts(sizes);
    const int64_t before = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t(0));
    const bool in_place = from.data == to.data + before * to.unit;
    const bool equal = std::all_of(counts.begin(), counts.end(),
                                   [&](int count) { return count == counts[0]; });
    const auto offsets = equal ? std::vector<int>() : Offsets(counts);
    if (equal && are_in_order && local_size > 1 && from.count) {
      AllgatherBetweenHosts(from, to, counts[rank]);
      return;
    }
    const void* own = in_place ? MPI_IN_PLACE : from.data;
    Do("all_gather", to.count * to.unit, [&](MPI_Request* request) {
      if (equal) {
        return MPI_Iallgather(own, counts[rank], from.type, to.data, counts[rank], to.type, comm,
                              request);
      }
      return MPI_Iallgatherv(own, counts[rank], from.type, to.data, counts.data(), offsets.data(),
                             to.type, comm, request);
    });
  }

  // The ranks with one local rank gather their parts; then the ranks of each host, what these have.
  void AllgatherBetweenHosts(const Buffer& from, const Buffer& to, int count) {
    const int hosts = size / local_size;
    const int64_t part = count * to.unit;
    const int local_rank = rank % local_size;
    const Tensor gathered = Temporary({hosts * part}, at::kByte);
    char* parts = static_cast<char*>(gathered.data_ptr());
    Do("all_gather", hosts * part, [&](MPI_Request* request) {
      return MPI_Iallgather(from.data, count, from.type, parts, count, to.type, cross, request);
    });
    std::vector<MPI_Request> requests(hosts);
    for (int host = 0; host < hosts; ++host) {
      char* of_host = to.data + host * local_size * part;
      std::memmove(of_host + local_rank * part, parts + host * part, part);
      Check(MPI_Iallgather(MPI_IN_PLACE, count, to.type, of_host, count, to.type, local,
                           &requests[host]),
            "all_gather");
    }
    for (auto request : requests) {
      Finish("all_gather", local_size * part, request);
    }
  }

  void ReduceScatter(const Tensor& in, const Tensor& out, const std::vector<int64_t>& elements,
                     const ReduceOp& op) {
    const Tensor own = Multiplied(in, op);
    const Buffer from(own), to(out);
    const int64_t units = in.numel() ? from.count / in.numel() : 1;
    std::vector<int64_t> counts;
    for (auto count : elements) {
      counts.push_back(count * units);
    }
    AddParts("reduce_scatter", from, from.data, to.data, counts, OperationOf(op, to.scalar));
    Scale(to, 0, to.count, op);
  }

  // Adds all ranks' parts of `data` for this rank in `own`. Every rank sends each other rank its part,
  // in pieces that are added while they are in the cache.
  void AddParts(const char* what, const Buffer& kind, const char* data, char* own,
                const std::vector<int64_t>& counts, MPI_Op operation) {
    std::vector<int64_t> offsets;
    int64_t total = 0;
    for (auto count : counts) {
      offsets.push_back(total);
      total += count;
    }
    const int64_t limit = HasPipeline() ? kExchanges : 1;
    if (!exchanged.defined()) {
      exchanged = at::empty({kExchangeBytes * limit}, at::kByte);
    }
    const int64_t most = kExchangeBytes / kind.unit;
    if (own != data + offsets[rank] * kind.unit) {
      std::memmove(own, data + offsets[rank] * kind.unit, counts[rank] * kind.unit);
    }
    std::deque<Exchange> under_way;
    int64_t begun = 0;
    auto finish_first = [&] {
      const Exchange first = under_way.front();
      under_way.pop_front();
      if (first.count) {
        Finish(what, kExchangeBytes, first.receiving);
        Check(MPI_Reduce_local(first.received, first.target, first.count, kind.type, operation), what);
      }
      if (first.sending != MPI_REQUEST_NULL) {
        Finish(what, kExchangeBytes, first.sending);
      }
    };
    for (int step = 1; step < size; ++step) {
      const int target = (rank + step) % size;
      const int source = (rank - step + size) % size;
      const int64_t length = std::max(counts[target], counts[rank]);
      for (int64_t at = 0; at < length; at += most) {
        if (static_cast<int64_t>(under_way.size()) == limit) {
          finish_first();
        }
        // The two parts may have different numbers of pieces.
        const int sent = Count(std::max<int64_t>(0, std::min(most, counts[target] - at)));
        const int got = Count(std::max<int64_t>(0, std::min(most, counts[rank] - at)));
        Exchange next;
        next.count = got;
        next.received = static_cast<char*>(exchanged.data_ptr()) + begun++ % limit * kExchangeBytes;
        next.target = own + at * kind.unit;
        if (got) {
          Check(MPI_Irecv(next.received, got, kind.type, source, 0, comm, &next.receiving), what);
        }
        if (sent) {
          Check(MPI_Isend(data + (offsets[target] + at) * kind.unit, sent, kind.type, target, 0,
                          comm, &next.sending),
                what);
        }
        under_way.push_back(next);
      }
    }
    while (!under_way.empty()) {
      finish_first();
    }
  }

  void Alltoall(const Tensor& in, const Tensor& out, const std::vector<int64_t>& sent,
                const std::vector<int64_t>& received) const {
    const Buffer from(in), to(out);
    const int64_t units = in.numel() ? from.count / in.numel()
                                     : (out.numel() ? to.count / out.numel() : 1);
    auto scaled = [&](std::vector<int64_t> elements) {
      for (auto& count : elements) {
        count *= units;
      }
      return Counts(elements);
    };
    auto sends = scaled(sent), receives = scaled(received);
    const auto send_offsets = Offsets(sends), receive_offsets = Offsets(receives);
    if (sends[rank] == receives[rank]) { // MPI would send this rank's own part in small pieces
      std::memmove(to.data + receive_offsets[rank] * to.unit,
                   from.data + send_offsets[rank] * from.unit, sends[rank] * from.unit);
      sends[rank] = receives[rank] = 0;
    }
    Do("all_to_all", (from.count + to.count) * to.unit, [&](MPI_Request* request) {
      return MPI_Ialltoallv(from.data, sends.data(), send_offsets.data(), from.type, to.data,
                            receives.data(), receive_offsets.data(), to.type, comm, request);
    });
  }

  void Gather(const Tensor& in, const Tensor& out, int root) const {
    const Buffer from(in);
    char* to = rank == root ? Buffer(out).data : nullptr;
    Do("gather", size * from.count * from.unit, [&](MPI_Request* request) {
      return MPI_Igather(from.data, Count(from.count), from.type, to, Count(from.count), from.type,
                         root, comm, request);
    });
  }

  void Scatter(const Tensor& in, const Tensor& out, int root) const {
    const Buffer to(out);
    const char* from = rank == root ? Buffer(in).data : nullptr;
    Do("scatter", size * to.count * to.unit, [&](MPI_Request* request) {
      return MPI_Iscatter(from, Count(to.count), to.type, to.data, Count(to.count), to.type, root,
                          comm, request);
    });
  }

  // The ranks' texts, for an error; empty if one of them has left the group.
  std::vector<std::string> Names(const std::string& own) const {
    auto texts = std::make_unique<char[]>((size + 1) * kNameBytes);
    char* all = texts.get();
    char* mine = all + size * kNameBytes;
    std::strncpy(mine, own.c_str(), kNameBytes - 1);
    MPI_Request request;
    Check(MPI_Iallgather(mine, kNameBytes, MPI_CHAR, all, kNameBytes, MPI_CHAR, comm, &request),
          own);
    const bool met = Patiently(request, kBusy, own, [&](microseconds waited) {
      return waited >= 5 * kLeave || ends(waited);
    });
    std::vector<std::string> names;
    if (!met) {
      texts.release(); // MPI may still write there
      return names;
    }
    for (int i = 0; i < size; ++i) {
      names.emplace_back(&all[i * kNameBytes]);
    }
    return names;
  }
};

class Work : public c10d::Work {
public:
  Work(OpType type, const char* title, const Tensors& inputs, Tensors outputs)
      : c10d::Work(-1, type, title, inputs), outputs_(std::move(outputs)),
        future_(c10::make_intrusive<at::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  Tensors result() override { return outputs_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  int sourceRank() const override { return source_; }

  void Finish(std::exception_ptr error, int source = -1) {
    source_ = source;
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(at::IValue(outputs_));
    }
    finish(error);
  }

private:
  const Tensors outputs_;
  const c10::intrusive_ptr<at::ivalue::Future> future_;
  std::atomic<int> source_{-1};
};

// What torch's options of a call say. Before torch 2.8 some do not say whether the caller waits.
struct Terms {
  milliseconds timeout;
  bool is_async;

  template <typename Options>
  Terms(const Options& opts) : timeout(opts.timeout), is_async(IsAsync(opts, 0)) {}

private:
  template <typename Options>
  static auto IsAsync(const Options& opts, int) -> decltype(opts.asyncOp) {
    return opts.asyncOp;
  }
  template <typename Options> static bool IsAsync(const Options&, long) { return true; }
};

// A collective of one rank.
struct Call {
  c10::intrusive_ptr<Work> work;
  std::string name; // the same on all ranks
  milliseconds timeout{0};
  bool is_awaited = true;
  int64_t bytes = 0;
  int64_t queued = 0;
  std::function<void(Peers&)> run;
};

struct Message {
  c10::intrusive_ptr<Work> work;
  std::string name;
  Clock::time_point deadline;
  MPI_Request request = MPI_REQUEST_NULL;
  Tensor sent, received, target;
  int tag = 0;
  bool is_from_any = false; // until the rank is known
};

// Reports calls that wait long, in the words of Horovod's stall inspector, which horovod_runner reads. A
// rank that waits says so in the group's store; ranks that do not are missing.
class StallInspector {
public:
  StallInspector(StorePointer store, std::vector<int> world_ranks, int rank)
      : store_(std::move(store)), world_ranks_(std::move(world_ranks)), rank_(rank) {
    const char* given = std::getenv("HOROVOD_STALL_CHECK_TIME_SECONDS");
    const int seconds = given == nullptr ? 60 : std::atoi(given);
    const char* disabled = std::getenv("HOROVOD_STALL_CHECK_DISABLE");
    is_on_ = seconds > 0 && (disabled == nullptr || std::atoi(disabled) == 0);
    interval_ = milliseconds(seconds * 500);
  }

  void Start() {
    ++call_;
    looks_ = 0;
  }

  void Look(const std::string& name, Clock::duration waited) {
    if (!is_on_ || waited < interval_ * (looks_ + 1)) {
      return;
    }
    ++looks_;
    try {
      if (!cloned_) {
        // A thread that waits for a key of the group's own store keeps its connection.
        store_ = Clone(*store_, 0);
        cloned_ = true;
      }
      const std::string prefix = "waits_" + std::to_string(call_) + "_";
      store_->set(prefix + std::to_string(rank_), std::vector<uint8_t>{1});
      if (looks_ > 1) { // by now all that wait have said so
        Report(name, prefix);
      }
    } catch (const std::exception&) {
      is_on_ = false; // the rank that has the store is gone
    }
  }

private:
  void Report(const std::string& name, const std::string& prefix) {
    std::string missing;
    for (size_t i = 0; i < world_ranks_.size(); ++i) {
      if (!store_->check({prefix + std::to_string(i)})) {
        missing += std::to_string(world_ranks_[i]) + ": [" + name + "]\n";
      } else if (static_cast<int>(i) < rank_) {
        return; // that rank reports
      }
    }
    const std::string text =
        "[W stall_inspector.cc: torch.distributed] Ranks of a process group wait for others for more "
        "than " + std::to_string(interval_.count() * looks_ / 1000) + " seconds\nMissing ranks:\n" +
        missing;
    std::fwrite(text.data(), 1, text.size(), stderr);
  }

  // Before torch 2.10 a store has no other connection.
  template <typename Store> auto Clone(Store& store, int) -> decltype(store.clone()) {
    return store.clone();
  }
  template <typename Store> StorePointer Clone(Store&, long) { return store_; }

  StorePointer store_;
  bool cloned_ = false;
  const std::vector<int> world_ranks_;
  const int rank_;
  milliseconds interval_;
  bool is_on_;
  int64_t call_ = 0;
  int looks_ = 0;
};

// What the threads of a group share with it. They are never joined, because they may wait for a rank
// that is gone, or for Python's interpreter lock.
class Engine : public std::enable_shared_from_this<Engine> {
public:
  Engine(StorePointer store, const std::vector<int>& world_ranks, int rank, int tag)
      : inspector_(std::move(store), world_ranks, rank) {
    World& world = World::Get();
    MPI_Group all, chosen;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, static_cast<int>(world_ranks.size()), world_ranks.data(), &chosen);
    Check(MPI_Comm_create_group(MPI_COMM_WORLD, chosen, tag, &peers_.comm), "new_group");
    MPI_Comm_set_errhandler(peers_.comm, MPI_ERRORS_RETURN);
    Check(MPI_Comm_dup(peers_.comm, &messages_comm_), "new_group");
    MPI_Group_free(&chosen);
    MPI_Group_free(&all);
    peers_.rank = rank;
    peers_.size = static_cast<int>(world_ranks.size());
    // A rank's own number counts the hosts that have its local rank. All ranks must cut alike.
    int hosts = world.hosts;
    Check(MPI_Allreduce(MPI_IN_PLACE, &hosts, 1, MPI_INT, MPI_MAX, peers_.comm), "new_group");
    peers_.piece = kPieceBytes * std::min({hosts, peers_.size, 256}); // a count of MPI is an int
    if (peers_.size > 2 || hosts > 1) {
      FindHosts();
    }
    // The collectives of one group of all ranks have the same numbers on all ranks.
    is_numbered_ = peers_.size == world.size && !world.has_numbered_group.exchange(true);
  }

  void Start() {
    std::thread([self = shared_from_this()] { self->RunCalls(); }).detach();
  }

  // The communicator of the messages.
  MPI_Comm messages_comm(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_stopping_, "The process group is destroyed, and ", name,
                " was called after that.");
    return messages_comm_;
  }

  void Add(Call call) {
    call.queued = common::HorovodNow();
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_stopping_, "The process group is destroyed, and ", call.name,
                " was called after that.");
    if (std::this_thread::get_id() != thread_) {
      calls_.push_back(std::move(call));
      changed_.notify_all();
      return;
    }
    // A callback of a call that has ended makes it, and may wait for it here: as PowerSGD's hook does.
    // It is the next one on all ranks.
    lock.unlock();
    Run(call);
  }

  void Add(Message message) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_stopping_, "The process group is destroyed, and ", message.name,
                " was called after that.");
    messages_.push_back(std::move(message));
    if (!has_messenger_) {
      has_messenger_ = true;
      ++threads_;
      std::thread([self = shared_from_this()] { self->RunMessages(); }).detach();
    }
    arrived_.notify_all();
  }

  // Ends the threads after the calls that are under way; `grace` limits their wait for other ranks.
  void Stop(milliseconds grace) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!is_stopping_) {
      leave_at_ = Clock::now() + grace;
      is_stopping_ = true;
      if (is_numbered_) {
        World::Get().has_numbered_group = false;
      }
      if (grace.count() && !failed_ && peers_.size > 1) {
        // A rank that leaves while others go on is an error of theirs.
        Call last;
        last.name = "destroy_process_group";
        last.timeout = grace;
        calls_.push_back(std::move(last));
      }
    }
    changed_.notify_all();
    arrived_.notify_all();
    if (grace.count()) {
      changed_.wait_until(lock, leave_at_ + grace, [&] { return ended_; });
    }
  }

private:
  // Sets the communicators of the pipeline.
  void FindHosts() {
    MPI_Comm local;
    Check(MPI_Comm_split_type(peers_.comm, MPI_COMM_TYPE_SHARED, peers_.rank, MPI_INFO_NULL, &local),
          "new_group");
    int here = 1, number = 0;
    MPI_Comm_size(local, &here);
    MPI_Comm_rank(local, &number);
    int sizes[] = {here, -here}; // the fewest on a host, and the most
    Check(MPI_Allreduce(MPI_IN_PLACE, sizes, 2, MPI_INT, MPI_MIN, peers_.comm), "new_group");
    const bool are_alike = sizes[0] == -sizes[1];
    const bool one_host = here == peers_.size;
    if (one_host && here == 2) {
      MPI_Comm_free(&local);
      return;
    }
    if (one_host || !are_alike) { // a ring of all ranks
      MPI_Comm_free(&local);
      here = 1;
      Check(MPI_Comm_dup(MPI_COMM_SELF, &local), "new_group");
      number = 0;
    }
    peers_.local = local;
    Check(MPI_Comm_split(peers_.comm, number, peers_.rank, &peers_.cross), "new_group");
    int host = 0;
    MPI_Comm_rank(peers_.cross, &host);
    int is_in_order = peers_.rank == host * here + number;
    Check(MPI_Allreduce(MPI_IN_PLACE, &is_in_order, 1, MPI_INT, MPI_MIN, peers_.comm), "new_group");
    peers_.are_in_order = is_in_order;
    peers_.local_size = here;
    MPI_Comm_set_errhandler(peers_.local, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(peers_.cross, MPI_ERRORS_RETURN);
    peers_.large = std::make_shared<between_hosts::Large>();
  }

  bool IsOver() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_stopping_ && Clock::now() >= leave_at_;
  }

  void RunCalls() {
    std::unique_lock<std::mutex> lock(mutex_);
    thread_ = std::this_thread::get_id();
    for (;;) {
      changed_.wait(lock, [&] { return !calls_.empty() || is_stopping_; });
      if (calls_.empty()) {
        break;
      }
      Call call = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      Run(call);
      call = Call(); // tensors are freed without the lock
      lock.lock();
    }
    if (!failed_) {
      MPI_Comm_free(&peers_.comm);
      if (peers_.HasPipeline()) {
        MPI_Comm_free(&peers_.local);
        MPI_Comm_free(&peers_.cross);
      }
    }
    ended_ = true;
    EndThread();
    changed_.notify_all();
  }

  // The last thread of a group that has lost no message frees the messages' communicator.
  void EndThread() {
    if (--threads_ == 0 && !failed_ && !gave_up_message_) {
      MPI_Comm_free(&messages_comm_);
    }
  }

  void Run(Call& call) {
    int64_t sequence = 0;
    std::exception_ptr error;
    try {
      if (failed_) {
        std::rethrow_exception(failed_);
      }
      peers_.is_awaited = call.is_awaited;
      peers_.ends = [this, &call](microseconds waited) {
        return waited >= call.timeout || IsOver();
      };
      Meet(call);
      if (call.run) {
        common::HorovodActivity activity;
        activity.bytes = call.bytes;
        activity.queued = call.queued;
        activity.tensors = 1;
        activity.process_set = is_numbered_ ? -1 : -2;
        sequence = common::HorovodActivityStarted(activity, call.name, *activities);
        at::AutoDispatchBelowADInplaceOrView guard;
        try {
          call.run(peers_);
        } catch (...) {
          (void)new auto(call.run); // MPI may still use its tensors
          (void)new auto(peers_.kept);
          (void)new auto(peers_.exchanged);
          (void)new auto(peers_.large);
          SetFailed();
          throw;
        }
      }
    } catch (...) {
      error = std::current_exception();
    }
    if (sequence) {
      common::HorovodActivityEnded(sequence, *activities);
    }
    peers_.kept.clear();
    call.run = nullptr;
    if (call.work) {
      call.work->Finish(error);
    }
  }

  // Further calls would meet others than the ranks do.
  void SetFailed() {
    std::lock_guard<std::mutex> lock(mutex_);
    failed_ = std::current_exception();
  }

  // Waits until all ranks are in the same call.
  void Meet(const Call& call) {
    if (peers_.size == 1) {
      return;
    }
    int64_t key = 1469598103934665603; // FNV-1a
    for (unsigned char letter : call.name) {
      key = static_cast<int64_t>((static_cast<uint64_t>(key) ^ letter) * 1099511628211ULL);
    }
    key &= INT64_MAX;
    auto keys = std::make_unique<int64_t[]>(2);
    keys[0] = key;
    keys[1] = -key;
    MPI_Request request;
    bool met = false;
    try {
      Check(MPI_Iallreduce(MPI_IN_PLACE, keys.get(), 2, MPI_INT64_T, MPI_MIN, peers_.comm,
                           &request),
            call.name);
      inspector_.Start();
      met = Patiently(request, kBusy, call.name, [&](microseconds waited) {
        inspector_.Look(call.name, waited);
        return peers_.ends(waited);
      });
      if (!met) {
        C10_THROW_ERROR(DistBackendError,
                        IsOver() ? call.name + " was given up: this rank left the process group"
                                 : "Timed out waiting " + std::to_string(call.timeout.count()) +
                                       " ms for other ranks in " + call.name);
      }
    } catch (...) {
      keys.release(); // MPI may still write there
      SetFailed();
      throw;
    }
    if (keys[0] != -keys[1]) {
      const auto names = peers_.Names(call.name);
      if (names.empty()) {
        try {
          C10_THROW_ERROR(DistBackendError,
                          "This rank called " + call.name + ", and another one has called something "
                          "else and left the process group. All ranks of a group must make the same "
                          "calls before one of them calls destroy_process_group");
        } catch (...) {
          SetFailed();
          throw;
        }
      }
      std::string text = "The ranks of the group called different collectives: ";
      for (int i = 0; i < peers_.size; ++i) {
        text += (i ? "; rank " : "rank ") + std::to_string(i) + " called " + names[i];
      }
      C10_THROW_ERROR(DistBackendError, text + ". All ranks of a group must make the same calls in "
                      "the same order, with tensors of one size and type");
    }
  }

  void RunMessages() {
    std::list<Message> pending;
    auto quiet_since = Clock::now();
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (pending.empty()) {
          arrived_.wait(lock, [&] { return !messages_.empty() || is_stopping_; });
        } else {
          const auto waited =
              std::chrono::duration_cast<microseconds>(Clock::now() - quiet_since);
          if (waited > kBusy) {
            arrived_.wait_for(lock, std::min(waited / 8, microseconds(1000)),
                              [&] { return !messages_.empty(); });
          }
        }
        if (!messages_.empty()) {
          quiet_since = Clock::now();
          pending.splice(pending.end(), messages_);
        }
        if (pending.empty() && is_stopping_) {
          EndThread();
          break;
        }
      }
      bool any = false;
      for (auto each = pending.begin(); each != pending.end();) {
        if (Test(*each)) {
          each = pending.erase(each);
          any = true;
        } else {
          ++each;
        }
      }
      if (any) {
        quiet_since = Clock::now();
      }
    }
  }

  // Looks for the rank of a message that may come from any, and begins to receive it. MPI_Irecv from
  // MPI_ANY_SOURCE would be simpler, but MPICH 5.0.2 may never end it if the ranks are on several hosts.
  void Match(Message& message) {
    int found = 0;
    MPI_Message matched;
    Check(MPI_Improbe(MPI_ANY_SOURCE, message.tag, messages_comm_, &found, &matched,
                      MPI_STATUS_IGNORE),
          message.name);
    if (found) {
      message.is_from_any = false;
      const Buffer buffer(message.received);
      Check(MPI_Imrecv(buffer.data, Count(buffer.count), buffer.type, &matched, &message.request),
            message.name);
    }
  }

  // Gives a message up. Returns true if it has been received meanwhile.
  bool Withdraw(Message& message, MPI_Status& status) {
    if (message.is_from_any) {
      return false;
    }
    // A receive that stays would take the next message with its tag.
    int done = 0;
    if (message.received.defined()) {
      Check(MPI_Cancel(&message.request), message.name);
      Check(MPI_Test(&message.request, &done, &status), message.name);
    }
    if (!done) {
      gave_up_message_ = true;
      (void)new Message(message); // MPI may still use its tensors
      return false;
    }
    int cancelled = 0;
    MPI_Test_cancelled(&status, &cancelled);
    return !cancelled;
  }

  // Whether a message is sent, received or given up.
  bool Test(Message& message) {
    std::exception_ptr error;
    MPI_Status status;
    try {
      int done = 0;
      if (message.is_from_any) {
        Match(message);
      }
      if (!message.is_from_any) {
        Check(MPI_Test(&message.request, &done, &status), message.name);
      }
      if (!done) {
        if (Clock::now() < message.deadline && !IsOver()) {
          return false;
        }
        if (!Withdraw(message, status)) {
          C10_THROW_ERROR(DistBackendError,
                          "Timed out waiting for the other rank in " + message.name);
        }
      }
      if (message.received.defined()) {
        const Buffer buffer(message.received);
        int count = 0;
        MPI_Get_count(&status, buffer.type, &count);
        TORCH_CHECK(count == buffer.count, message.name, " got ", count, " elements from rank ",
                    status.MPI_SOURCE, ": the ranks' tensors must have the same size and type.");
        if (!message.target.is_same(message.received)) {
          at::AutoDispatchBelowADInplaceOrView guard;
          message.target.copy_(message.received);
        }
      }
    } catch (...) {
      error = std::current_exception();
    }
    message.work->Finish(error, message.received.defined() && !error ? status.MPI_SOURCE : -1);
    return true;
  }

  Peers peers_; // after Start: of the thread of the calls
  StallInspector inspector_;
  MPI_Comm messages_comm_ = MPI_COMM_NULL;
  bool is_numbered_ = false;
  std::mutex mutex_;
  std::condition_variable changed_, arrived_;
  std::deque<Call> calls_;
  std::list<Message> messages_;
  std::exception_ptr failed_;
  bool has_messenger_ = false;
  bool gave_up_message_ = false; // of the thread of the messages, and then of the last thread
  int threads_ = 1;
  std::thread::id thread_; // that runs the calls
  bool is_stopping_ = false;
  bool ended_ = false;
  Clock::time_point leave_at_;
};

// A tensor that a collective writes: directly if it is contiguous.
struct Output {
  Tensor target, flat;

  explicit Output(const Tensor& tensor) : target(tensor) {
    at::AutoDispatchBelowADInplaceOrView guard;
    flat = tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options());
  }

  void Finish() const {
    if (!flat.is_same(target)) {
      target.copy_(flat);
    }
  }
};

Tensor Contiguous(const Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.contiguous();
}

// Copies parts that lie one after the other to tensors, or back.
void Split(const Tensor& flat, const Tensors& tensors) {
  int64_t at = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
}

Tensor Join(const Tensors& tensors) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Tensors flat;
  for (const auto& tensor : tensors) {
    flat.push_back(tensor.reshape({-1}));
  }
  return at::cat(flat);
}

std::vector<int64_t> Sizes(const Tensors& tensors) {
  std::vector<int64_t> sizes;
  for (const auto& tensor : tensors) {
    sizes.push_back(tensor.numel());
  }
  return sizes;
}

int64_t Total(const std::vector<int64_t>& sizes) {
  int64_t total = 0;
  for (auto size : sizes) {
    total += size;
  }
  return total;
}

// The parts of ranks for the name of a call, if they differ.
std::string PartsText(const std::vector<int64_t>& sizes) {
  std::string text;
  if (!std::equal(sizes.begin() + 1, sizes.end(), sizes.begin())) {
    for (auto size : sizes) {
      text += (text.empty() ? "in parts of " : ", ") + std::to_string(size);
    }
    text += " ";
  }
  return text;
}

std::string Text(int64_t count, const Tensor& tensor) {
  return std::to_string(count) + " " + c10::toString(tensor.scalar_type());
}

class Backend : public c10d::Backend {
public:
  Backend(StorePointer store, int rank, const std::vector<int>& world_ranks, milliseconds timeout,
          int tag)
      : c10d::Backend(rank, static_cast<int>(world_ranks.size())), timeout_(timeout),
        engine_(std::make_shared<Engine>(std::move(store), world_ranks, rank, tag)) {
    engine_->Start();
  }

  ~Backend() override { engine_->Stop(milliseconds(0)); }

  const std::string getBackendName() const override { return "hvd"; }

  c10::intrusive_ptr<Options> getBackendOptions() {
    return c10::make_intrusive<Options>("hvd", timeout_.load());
  }

  void setTimeout(milliseconds timeout) { timeout_ = timeout; }

  void setSequenceNumberForGroup() override {}

  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void shutdown() { engine_->Stop(kLeave); }

  void abort() { engine_->Stop(milliseconds(0)); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const Tensor& tensor = One(tensors);
    const int root = static_cast<int>(opts.rootRank);
    // The root's own tensor is read only.
    Output output(tensor);
    if (rank_ == root) {
      output.flat = output.target = Contiguous(tensor);
    }
    return Add(OpType::BROADCAST, "hvd:broadcast",
               "broadcast of " + Text(tensor.numel(), tensor) + " from rank " +
                   std::to_string(root),
               opts, tensors, tensors, [output, root](Peers& peers) {
                 peers.Broadcast(output.flat, root);
                 output.Finish();
               });
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return Reduced(OpType::ALLREDUCE, tensors, opts);
  }

  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return Reduced(OpType::_ALLREDUCE_SPARSE, tensors, opts);
  }

  WorkPointer allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts) override {
    return Reduced(OpType::ALLREDUCE_COALESCED, tensors, opts);
  }

  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const Tensor& tensor = One(tensors);
    CheckReduction(opts.reduceOp, tensor);
    const int root = static_cast<int>(opts.rootRank);
    Output output(tensor);
    output.flat = Contiguous(tensor);
    if (rank_ != root) {
      output.target = output.flat;
    }
    return Add(OpType::REDUCE, "hvd:reduce",
               "reduce of " + Text(tensor.numel(), tensor) + " (" + Reduction(opts.reduceOp) +
                   ") to rank " + std::to_string(root),
               opts, tensors, tensors,
               [output, op = opts.reduceOp, root](Peers& peers) {
                 peers.Reduce(output.flat, op, root);
                 output.Finish();
               });
  }

  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& opts) override {
    return Gathered(OpType::ALLGATHER, outputs, inputs, opts);
  }

  WorkPointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) override {
    // Its first index is the rank.
    TORCH_CHECK(static_cast<int>(outputs.size()) == size_, "all_gather_coalesced needs ", size_,
                " lists of outputs and got ", outputs.size());
    std::vector<Tensors> by_tensor(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (const auto& list : outputs) {
        by_tensor[i].push_back(list.at(i));
      }
    }
    return Gathered(OpType::ALLGATHER_COALESCED, by_tensor, inputs, opts);
  }

  WorkPointer _allgather_base(Tensor& output, Tensor& input,
                              const c10d::AllgatherOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return GatheredIntoTensors(OpType::_ALLGATHER_BASE, outputs, inputs, opts);
  }

  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) override {
    return GatheredIntoTensors(OpType::COALESCED, outputs, inputs, opts);
  }

  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs,
                     const c10d::GatherOptions& opts) override {
    const Tensor& input = One(inputs);
    const int root = static_cast<int>(opts.rootRank);
    Tensors list;
    if (rank_ == root) {
      TORCH_CHECK(outputs.size() == 1, "gather needs one list of outputs on its destination");
      list = outputs[0];
      CheckParts(list, "gather", input.numel());
    }
    auto flat = at::empty({rank_ == root ? input.numel() * size_ : 0}, input.options());
    return Add(OpType::GATHER, "hvd:gather",
               "gather of " + Text(input.numel(), input) + " to rank " + std::to_string(root),
               opts, inputs, list,
               [in = Contiguous(input), flat, list, root](Peers& peers) {
                 peers.Gather(in, flat, root);
                 Split(flat, list);
               });
  }

  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ScatterOptions& opts) override {
    const Tensor& output = One(outputs);
    const int root = static_cast<int>(opts.rootRank);
    Tensor flat;
    if (rank_ == root) {
      TORCH_CHECK(inputs.size() == 1, "scatter needs one list of inputs on its source");
      CheckParts(inputs[0], "scatter", output.numel());
      flat = Join(inputs[0]);
    }
    return Add(OpType::SCATTER, "hvd:scatter",
               "scatter of " + Text(output.numel(), output) + " from rank " + std::to_string(root),
               opts, outputs, outputs, [flat, out = Output(output), root](Peers& peers) {
                 peers.Scatter(flat, out.flat, root);
                 out.Finish();
               });
  }

  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& opts) override {
    const Tensor& output = One(outputs);
    TORCH_CHECK(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_,
                "reduce_scatter needs a list of ", size_, " inputs");
    const auto sizes = Sizes(inputs[0]);
    TORCH_CHECK(sizes[rank_] == output.numel(), "reduce_scatter's output has ", output.numel(),
                " elements, and this rank's part of the inputs has ", sizes[rank_]);
    return Scattered(OpType::REDUCE_SCATTER, {Join(inputs[0])}, outputs, {sizes}, opts);
  }

  WorkPointer _reduce_scatter_base(Tensor& output, Tensor& input,
                                   const c10d::ReduceScatterOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return ScatteredFromTensors(OpType::_REDUCE_SCATTER_BASE, outputs, inputs, opts);
  }

  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& opts) override {
    return ScatteredFromTensors(OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, inputs, opts);
  }

  WorkPointer alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& opts) override {
    CheckTensor(input);
    CheckSame(input, output, "all_to_all_single");
    const auto sent = Elements(input_splits, input);
    const auto received = Elements(output_splits, output);
    CheckTotals(input, sent, received);
    Output out(output);
    return Add(OpType::ALLTOALL_BASE, "hvd:all_to_all",
               std::string("all_to_all of ") + c10::toString(input.scalar_type()), opts,
               {input}, {output},
               [in = Contiguous(input), out, sent, received](Peers& peers) {
                 peers.Alltoall(in, out.flat, sent, received);
                 out.Finish();
               });
  }

  WorkPointer alltoall(Tensors& outputs, Tensors& inputs,
                       const c10d::AllToAllOptions& opts) override {
    TORCH_CHECK(static_cast<int>(inputs.size()) == size_ &&
                    static_cast<int>(outputs.size()) == size_,
                "all_to_all needs ", size_, " inputs and outputs, and got ", inputs.size(), " and ",
                outputs.size());
    for (const auto& output : outputs) {
      CheckTensor(inputs[0]);
      CheckSame(inputs[0], output, "all_to_all");
    }
    const auto sent = Sizes(inputs), received = Sizes(outputs);
    CheckTotals(inputs[0], sent, received);
    auto flat = at::empty({Total(received)}, outputs[0].options());
    return Add(OpType::ALLTOALL, "hvd:all_to_all",
               std::string("all_to_all of ") + c10::toString(inputs[0].scalar_type()),
               opts, inputs, outputs,
               [in = Join(inputs), flat, outputs, sent, received](Peers& peers) {
                 peers.Alltoall(in, flat, sent, received);
                 Split(flat, outputs);
               });
  }

  WorkPointer barrier(const c10d::BarrierOptions& opts) override {
    return Add(OpType::BARRIER, "hvd:barrier", "barrier", opts, {}, {}, [](Peers&) {});
  }

  WorkPointer send(Tensors& tensors, int target, int tag) override {
    const Tensor& tensor = One(tensors);
    Message message;
    message.sent = Contiguous(tensor);
    message.name = "send of " + Text(tensor.numel(), tensor) + " to rank " + std::to_string(target);
    message.work = c10::make_intrusive<Work>(OpType::SEND, "hvd:send", tensors, Tensors());
    const Buffer buffer(message.sent);
    Check(MPI_Isend(buffer.data, Count(buffer.count), buffer.type, target, tag,
                    engine_->messages_comm(message.name), &message.request),
          message.name);
    return Add(std::move(message));
  }

  WorkPointer recv(Tensors& tensors, int source, int tag) override {
    return Receive(OpType::RECV, tensors, source, tag, "rank " + std::to_string(source));
  }

  WorkPointer recvAnysource(Tensors& tensors, int tag) override {
    return Receive(OpType::RECVANYSOURCE, tensors, MPI_ANY_SOURCE, tag, "any rank");
  }

private:
  static void CheckTensor(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cpu() && tensor.layout() == at::kStrided,
                "The torch.distributed backend hvd got a tensor with device ", tensor.device(),
                " and layout ", tensor.layout(), ". It supports dense CPU tensors, and sparse ones "
                "in all_reduce. For GPUs use \"cpu:hvd,cuda:nccl\".");
  }

  static const Tensor& One(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "The call needs one tensor, and got ", tensors.size());
    CheckTensor(tensors[0]);
    return tensors[0];
  }

  static void CheckSame(const Tensor& in, const Tensor& out, const char* what) {
    CheckTensor(out);
    TORCH_CHECK(in.scalar_type() == out.scalar_type(), what, " needs tensors of one type, and got ",
                in.scalar_type(), " and ", out.scalar_type());
  }

  void CheckParts(const Tensors& parts, const char* what, int64_t elements) const {
    TORCH_CHECK(static_cast<int>(parts.size()) == size_, what, " needs a list of ", size_,
                " tensors, and got ", parts.size());
    for (const auto& part : parts) {
      CheckTensor(part);
      TORCH_CHECK(part.numel() == elements, what, " needs tensors of one size, and got ",
                  part.numel(), " and ", elements, " elements");
    }
  }

  // MPI's offsets of the parts are ints. Refused before the ranks meet in the call.
  static void CheckTotals(const Tensor& tensor, const std::vector<int64_t>& sent,
                          const std::vector<int64_t>& received) {
    const int64_t units = tensor.is_complex() ? 2 : 1;
    Count(std::max(Total(sent), Total(received)) * units);
  }

  static void CheckReduction(const ReduceOp& op, const Tensor& tensor) {
    const bool is_linear = op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG;
    const auto type = tensor.is_complex() && is_linear ? c10::toRealValueType(tensor.scalar_type())
                                                       : tensor.scalar_type();
    TORCH_CHECK(TypeOf(type) != MPI_DATATYPE_NULL && OperationOf(op, type) != MPI_OP_NULL,
                "The torch.distributed backend hvd cannot reduce tensors of ", tensor.scalar_type(),
                " by ", Reduction(op), ".");
  }

  // Numbers of elements by rank.
  std::vector<int64_t> Elements(const std::vector<int64_t>& splits, const Tensor& tensor) const {
    const int64_t rows = tensor.dim() ? tensor.size(0) : 0;
    if (splits.empty()) {
      TORCH_CHECK(rows % size_ == 0, "all_to_all_single without split sizes needs a first dimension "
                  "that is divisible by ", size_, ", and got ", rows);
      return std::vector<int64_t>(size_, tensor.numel() / size_);
    }
    TORCH_CHECK(static_cast<int>(splits.size()) == size_ && Total(splits) == rows,
                "all_to_all_single needs ", size_, " split sizes whose sum is ", rows);
    std::vector<int64_t> elements;
    for (auto split : splits) {
      elements.push_back(rows ? split * (tensor.numel() / rows) : 0);
    }
    return elements;
  }

  WorkPointer Add(OpType type, const char* title, std::string name, const Terms& terms,
                  const Tensors& inputs, const Tensors& outputs,
                  std::function<void(Peers&)> run) {
    Call call;
    call.work = c10::make_intrusive<Work>(type, title, inputs, outputs);
    call.name = std::move(name);
    call.timeout = terms.timeout == c10d::kUnsetTimeout ? timeout_.load() : terms.timeout;
    call.is_awaited = !terms.is_async;
    for (const auto& input : inputs) {
      call.bytes += input.layout() == at::kStrided ? input.numel() * input.element_size() : 0;
    }
    call.run = std::move(run);
    WorkPointer work = call.work;
    ++sequence_;
    engine_->Add(std::move(call));
    return work;
  }

  WorkPointer Add(Message message) {
    message.deadline = Clock::now() + timeout_.load();
    WorkPointer work = message.work;
    engine_->Add(std::move(message));
    return work;
  }

  WorkPointer Receive(OpType type, Tensors& tensors, int source, int tag, const std::string& who) {
    const Output output(One(tensors));
    Message message;
    message.target = output.target;
    message.received = output.flat;
    message.name = "recv of " + Text(output.flat.numel(), output.flat) + " from " + who;
    message.work = c10::make_intrusive<Work>(type, "hvd:recv", tensors, tensors);
    message.tag = tag;
    message.is_from_any = source == MPI_ANY_SOURCE;
    const Buffer buffer(output.flat);
    const int count = Count(buffer.count);
    if (!message.is_from_any) {
      Check(MPI_Irecv(buffer.data, count, buffer.type, source, tag,
                      engine_->messages_comm(message.name), &message.request),
            message.name);
    }
    return Add(std::move(message));
  }

  WorkPointer Reduced(OpType type, const Tensors& tensors, const c10d::AllreduceOptions& opts) {
    if (tensors.size() == 1 && tensors[0].is_sparse()) {
      return SparseReduced(type, tensors, opts);
    }
    std::vector<Output> outputs;
    std::string name = "all_reduce of ";
    for (const auto& tensor : tensors) {
      CheckTensor(tensor);
      CheckReduction(opts.reduceOp, tensor);
      outputs.emplace_back(tensor);
      outputs.back().flat = Contiguous(tensor);
      name += Text(tensor.numel(), tensor) + " ";
    }
    return Add(type, "hvd:all_reduce", name + "(" + Reduction(opts.reduceOp) + ")", opts,
               tensors, tensors, [outputs, op = opts.reduceOp](Peers& peers) {
                 for (const auto& output : outputs) {
                   peers.Allreduce(output.flat, op);
                   output.Finish();
                 }
               });
  }

  // The sum of sparse tensors: all entries of all ranks.
  WorkPointer SparseReduced(OpType type, const Tensors& tensors,
                            const c10d::AllreduceOptions& opts) {
    TORCH_CHECK(opts.reduceOp == ReduceOp::SUM, "all_reduce of sparse tensors needs ReduceOp.SUM");
    return Add(type, "hvd:all_reduce", "all_reduce of sparse " + Text(tensors[0].numel(), tensors[0]),
               opts, tensors, tensors, [tensor = tensors[0]](Peers& peers) {
                 const Tensor own = tensor.coalesce();
                 const Tensor places = own._indices().t().contiguous();
                 const Tensor values = own._values().contiguous();
                 Tensor counts = peers.Temporary({peers.size}, at::kLong);
                 peers.Allgather(at::full({1}, places.size(0), at::kLong), counts,
                                 std::vector<int64_t>(peers.size, 1));
                 auto gather = [&](const Tensor& part) {
                   auto sizes = part.sizes().vec();
                   sizes[0] = counts.sum().item<int64_t>();
                   const int64_t row = c10::multiply_integers(part.sizes().slice(1));
                   std::vector<int64_t> elements;
                   for (int i = 0; i < peers.size; ++i) {
                     elements.push_back(counts[i].item<int64_t>() * row);
                   }
                   const Tensor all = peers.Temporary(sizes, part.options());
                   peers.Allgather(part, all, elements);
                   return all;
                 };
                 const Tensor all_places = gather(places), all_values = gather(values);
                 tensor.copy_(
                     at::sparse_coo_tensor(all_places.t(), all_values, tensor.sizes()).coalesce());
               });
  }

  WorkPointer Gathered(OpType type, const std::vector<Tensors>& outputs, const Tensors& inputs,
                       const c10d::AllgatherOptions& opts) {
    TORCH_CHECK(outputs.size() == inputs.size(), "all_gather needs a list of outputs for each of ",
                inputs.size(), " inputs, and got ", outputs.size());
    std::string name = "all_gather of ";
    Tensors own, all_outputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      TORCH_CHECK(static_cast<int>(outputs[i].size()) == size_, "all_gather needs ", size_,
                  " outputs, and got ", outputs[i].size());
      CheckTensor(inputs[i]);
      for (const auto& output : outputs[i]) {
        CheckSame(inputs[i], output, "all_gather");
        all_outputs.push_back(output);
      }
      const auto sizes = Sizes(outputs[i]);
      TORCH_CHECK(inputs[i].numel() == sizes[rank_], "all_gather's input has ", inputs[i].numel(),
                  " elements, and the output for this rank has ", sizes[rank_]);
      name += Text(Total(sizes), inputs[i]) + " " + PartsText(sizes);
      own.push_back(Contiguous(inputs[i]));
    }
    return Add(type, "hvd:all_gather", name, opts, inputs, all_outputs,
               [own, outputs](Peers& peers) {
                 for (size_t i = 0; i < own.size(); ++i) {
                   const auto sizes = Sizes(outputs[i]);
                   auto flat = peers.Temporary({Total(sizes)}, own[i].options());
                   peers.Allgather(own[i], flat, sizes);
                   Split(flat, outputs[i]);
                 }
               });
  }

  WorkPointer GatheredIntoTensors(OpType type, const Tensors& outputs, const Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) {
    TORCH_CHECK(outputs.size() == inputs.size(), "all_gather_into_tensor needs an output for each "
                "of ", inputs.size(), " inputs, and got ", outputs.size());
    std::string name = "all_gather of ";
    Tensors own;
    std::vector<Output> all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      CheckTensor(inputs[i]);
      CheckSame(inputs[i], outputs[i], "all_gather_into_tensor");
      TORCH_CHECK(outputs[i].numel() == inputs[i].numel() * size_,
                  "all_gather_into_tensor's output has ", outputs[i].numel(),
                  " elements; it needs ", size_, " times the input's ", inputs[i].numel());
      name += Text(outputs[i].numel(), inputs[i]) + " ";
      own.push_back(Contiguous(inputs[i]));
      all.emplace_back(outputs[i]);
    }
    return Add(type, "hvd:all_gather", name, opts, inputs, outputs,
               [own, all](Peers& peers) {
                 for (size_t i = 0; i < own.size(); ++i) {
                   peers.Allgather(own[i], all[i].flat,
                                   std::vector<int64_t>(peers.size, own[i].numel()));
                   all[i].Finish();
                 }
               });
  }

  WorkPointer ScatteredFromTensors(OpType type, const Tensors& outputs, const Tensors& inputs,
                                   const c10d::ReduceScatterOptions& opts) {
    TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter_tensor needs an output for each of ",
                inputs.size(), " inputs, and got ", outputs.size());
    std::vector<std::vector<int64_t>> sizes;
    for (size_t i = 0; i < inputs.size(); ++i) {
      TORCH_CHECK(inputs[i].numel() == outputs[i].numel() * size_,
                  "reduce_scatter_tensor's input has ", inputs[i].numel(), " elements; it needs ",
                  size_, " times the output's ", outputs[i].numel());
      sizes.emplace_back(size_, outputs[i].numel());
    }
    return Scattered(type, inputs, outputs, sizes, opts);
  }

  WorkPointer Scattered(OpType type, const Tensors& inputs, const Tensors& outputs,
                        const std::vector<std::vector<int64_t>>& sizes,
                        const c10d::ReduceScatterOptions& opts) {
    std::string name = "reduce_scatter of ";
    Tensors own;
    std::vector<Output> parts;
    for (size_t i = 0; i < inputs.size(); ++i) {
      CheckTensor(inputs[i]);
      CheckSame(inputs[i], outputs[i], "reduce_scatter");
      CheckReduction(opts.reduceOp, inputs[i]);
      name += Text(inputs[i].numel(), inputs[i]) + " " + PartsText(sizes[i]);
      own.push_back(Contiguous(inputs[i]));
      parts.emplace_back(outputs[i]);
    }
    return Add(type, "hvd:reduce_scatter", name + "(" + Reduction(opts.reduceOp) + ")",
               opts, inputs, outputs, [own, parts, sizes, op = opts.reduceOp](Peers& peers) {
                 for (size_t i = 0; i < own.size(); ++i) {
                   peers.ReduceScatter(own[i], parts[i].flat, sizes[i], op);
                   parts[i].Finish();
                 }
               });
  }

  std::atomic<milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};
  const std::shared_ptr<Engine> engine_;
};

} // namespace

PYBIND11_MODULE(process_group, module) {
  activities = pybind11::module_::import("horovod.torch.mpi_lib_v2")
                   .attr("horovod_runner_activities")
                   .cast<pybind11::capsule>()
                   .get_pointer<common::HorovodActivityLog>();
  module.attr("missing") = "";
  module.def("mpi_rank", [] { return World::Get().rank; },
             pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def(
      "process_group",
      [](const StorePointer& store, int rank, const std::vector<int>& world_ranks, double timeout,
         int tag) {
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Backend>(
            store, rank, world_ranks, milliseconds(static_cast<int64_t>(timeout * 1000)), tag));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}

} // namespace torch
} // namespace horovod

#endif // HOROVOD_RUNNER_MISSING
