"""Horovod's source: fetched from the package registry, checked, and mended before it is built.

Horovod 0.28.1 is the last release. It does not compile against today's frameworks; slips in it keep
its stall inspector dead under Gloo, its process sets off the job's network interface and
TensorFlow's second join from waiting; and whoever waits for a collective burns a core. Each edit
below is ours, is made to the unpacked source and says why; none changes what a collective computes.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod_runner.errors import InstallError

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# Variables of the build that the edits below read.
RPATH = "HOROVOD_RUNNER_RPATH"
REQUIRES = "HOROVOD_RUNNER_REQUIRES"
# Read by cmake/Modules/FindPytorch.cmake among the files laid over the source.
CPU_ONLY = "HOROVOD_RUNNER_CPU"
# Files that replace Horovod's own of the same path.
OVERLAY = Path(__file__).parent / "horovod_overlay"


@dataclass(frozen=True)
class Edit:
    """Replace every occurrence of ``old`` in one file; the text must be there."""

    path: str
    old: str
    new: str
    why: str = field(repr=False)  # no part of what names a build


_WAITED_FOR = ("Allgather", "Allreduce", "Alltoall", "Barrier", "Bcast", "Gather", "Gatherv")
_PATIENTLY = """#include <algorithm>
#include <chrono>
#include <thread>

template <typename Call, typename... Arguments>
static int HorovodPatiently(Call call, Arguments... arguments) {
  using namespace std::chrono;
  MPI_Request request;
  int code = call(arguments..., &request);
  const auto start = steady_clock::now();
  for (int done = 0; code == MPI_SUCCESS;) {
    code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) {
      break;
    }
    const auto waited = duration_cast<microseconds>(steady_clock::now() - start);
    if (waited < microseconds(200)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min(waited / 8, microseconds(1000)));
    }
  }
  return code;
}
""" + "".join(
    f"#define MPI_{name}(...) HorovodPatiently(MPI_I{name.lower()}, __VA_ARGS__)\n"
    for name in _WAITED_FOR
)


def _shared_library(prefix: str, package: str) -> str:
    """CMake code for a framework's library, made of the common objects and of its own."""
    return f"""add_library({package}_objects OBJECT ${{{prefix}_SOURCES}})
target_include_directories({package}_objects PRIVATE
        "${{EIGEN_INCLUDE_PATH}}" "${{FLATBUFFERS_INCLUDE_PATH}}")
if({package}_CXX11)
    set(COMMON_OBJECTS $<TARGET_OBJECTS:horovod_common_1>)
else()
    set(COMMON_OBJECTS $<TARGET_OBJECTS:horovod_common_0>)
endif()
add_library(${{{prefix}_TARGET_LIB}} SHARED
        $<TARGET_OBJECTS:{package}_objects> ${{COMMON_OBJECTS}})"""


EDITS = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        f'set(CMAKE_INSTALL_RPATH "$ENV{{{RPATH}}}")',
        "torch 2.1 and later need C++17; and a library path of the build environment has no place "
        "in a wheel (torch and TensorFlow have loaded what Horovod links to), but the way to the "
        "mpich package beside it has",
    ),
    Edit(
        "CMakeLists.txt",
        "# Add architecture specific optimization flags",
        'string(REPLACE "-g " "" '
        'CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n'
        "# Add architecture specific optimization flags",
        "debug information makes the build a third longer and the wheel ten times larger",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "the same for the torch library",
    ),
    Edit(
        "CMakeLists.txt",
        "# TF\nadd_subdirectory(horovod/tensorflow)",
        """set(WITHOUT_MPI common fusion_buffer_manager group_table logging message
        parameter_manager stall_inspector thread_pool timeline tensor_queue
        optim/bayesian_optimization optim/gaussian_process)
list(TRANSFORM WITHOUT_MPI PREPEND "${PROJECT_SOURCE_DIR}/horovod/common/")
list(TRANSFORM WITHOUT_MPI APPEND ".cc")
list(REMOVE_ITEM SOURCES ${WITHOUT_MPI})
list(PREPEND SOURCES ${WITHOUT_MPI})
foreach(ABI 0 1)
    add_library(horovod_common_${ABI} OBJECT EXCLUDE_FROM_ALL ${SOURCES})
    target_compile_definitions(horovod_common_${ABI} PRIVATE _GLIBCXX_USE_CXX11_ABI=${ABI})
    target_include_directories(horovod_common_${ABI} PRIVATE
            "${EIGEN_INCLUDE_PATH}" "${FLATBUFFERS_INCLUDE_PATH}")
    if("$ENV{HOROVOD_RUNNER_CPU}" STREQUAL "1")
        set_target_properties(horovod_common_${ABI} PROPERTIES
                UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
    endif()
endforeach()
set_source_files_properties("${PROJECT_SOURCE_DIR}/horovod/common/mpi/mpi_controller.cc"
        PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

# TF
add_subdirectory(horovod/tensorflow)""",
        "sources that include no framework are compiled once for each C++ ABI in use, not once for "
        "each framework; in a build for CPUs four at a time, since they read the same headers. "
        "Those that include nothing of MPI come first: ccache knows them from a build with another "
        "MPI. The macros that the edits define in mpi_controller.cc are for that file alone",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        "add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})",
        _shared_library("TF", "Tensorflow"),
        "TensorFlow's library takes the common objects; its own sources wait for no other target",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})",
        _shared_library("PYTORCH", "Pytorch"),
        "torch's library takes the common objects; its own sources wait for no other target",
    ),
    Edit(
        "CMakeLists.txt",
        "add_subdirectory(third_party/gloo)",
        """add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)
if("$ENV{HOROVOD_RUNNER_CPU}" STREQUAL "1")
    set_target_properties(gloo PROPERTIES UNITY_BUILD ON)
    set_source_files_properties(third_party/gloo/gloo/allreduce_local.cc TARGET_DIRECTORY gloo
            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endif()""",
        "Gloo for the newer C++ ABI is built only where a framework uses that ABI. Its forty small "
        "files spend their time on the same headers: the compiler gets eight of them at a time, "
        "without the one that names what another one names differently",
    ),
    Edit(
        "CMakeLists.txt",
        "if(HAVE_GLOO AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))",
        "if(FALSE)",
        "GCC and Clang use one ABI for C++11 and C++17: TensorFlow takes the Gloo that torch takes",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        "if (Tensorflow_CXX17)\n       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n    elseif",
        "if",
        "the same, where it is linked",
    ),
    Edit(
        "horovod/torch/adapter_v2.h",
        "#include <torch/extension.h>\n#include <torch/torch.h>\n",
        "#include <torch/types.h>\n",
        "tensors are all that it takes of torch's headers, of which reading all takes longest",
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "#include <torch/extension.h>\n#include <torch/torch.h>\n",
        "#include <torch/csrc/utils/pybind.h>\n#include <torch/types.h>\n",
        "the same, with their Python bindings",
    ),
    Edit(
        "CMakeLists.txt",
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)",
        """if(NOT "$ENV{HOROVOD_RUNNER_CPU}" STREQUAL "1")
    include(CheckLanguage)
    check_language(CUDA)
endif()
if(NOT CMAKE_CUDA_COMPILER AND NOT "$ENV{HOROVOD_RUNNER_CPU}" STREQUAL "1")""",
        "a build for CPUs does not look for a CUDA compiler and try it out",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python 3.12 and later have no distutils",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
        "the XLA kernels include headers that TensorFlow no longer ships; they were optional",
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "stream_executor::gpu::AsGpuStreamValue(",
        "horovod_gpu_stream(",
        "TensorFlow 2.21 no longer exports AsGpuStreamValue",
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "// Undef LOG macro from TensorFlow",
        "#if HAVE_GPU\n"
        "static inline GpuStreamHandle horovod_gpu_stream(stream_executor::Stream* stream) {\n"
        "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n"
        "}\n"
        "#endif\n"
        "// Undef LOG macro from TensorFlow",
        "its replacement asks the stream itself",
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        '#include "tensorflow/compiler/xla/stream_executor/stream.h"',
        '#if __has_include("xla/stream_executor/stream.h")\n'
        '#include "xla/stream_executor/stream.h"\n'
        "#else\n"
        '#include "tensorflow/compiler/xla/stream_executor/stream.h"\n'
        "#endif",
        "the header has moved",
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        'REGISTER_OP("HorovodJoin")\n',
        'REGISTER_OP("HorovodJoin")\n    .SetIsStateful()\n',
        "TensorFlow took join, which has no input, for a constant: from the second call on it "
        "waited for nobody",
    ),
    Edit(
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_);",
        "global_ranks_.resize(size_);",
        "the vector stayed empty, which left the stall inspector without ranks: silent hangs",
    ),
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        "  assert(global_context.IsEnabled());\n",
        "  assert(global_context.IsEnabled());\n  gloo_iface_ = global_context.gloo_iface_;\n",
        "process sets, and every job has one, took the address that the hostname leads to and not "
        "HOROVOD_GLOO_IFACE's: 127.0.1.1 on many hosts, where no other host reaches it",
    ),
    Edit(
        "horovod/common/ops/mpi_operations.cc",
        """  int op =
      MPI_Allreduce(sendbuf, buffer_data, (int)num_elements,
                    mpi_context.GetMPIDataType(first_entry.tensor),
                    mpiOp,
                    mpi_context.GetMPICommunicator(Communicator::GLOBAL));
  if (op != MPI_SUCCESS) {
    throw std::runtime_error("MPI_Allreduce failed, see MPI output for details.");
  }
""",
        """  const int64_t element = mpi_context.GetMPITypeSize(first_entry.tensor->dtype());
  const int64_t piece =
      (4 << 20) / element * std::max(1, process_set.controller->GetCrossSize());
  for (int64_t done = 0; done < num_elements; done += piece) {
    const void* from = sendbuf == MPI_IN_PLACE
                           ? sendbuf
                           : static_cast<const uint8_t*>(sendbuf) + done * element;
    int op = MPI_Allreduce(from, static_cast<uint8_t*>(buffer_data) + done * element,
                           static_cast<int>(std::min(piece, num_elements - done)),
                           mpi_context.GetMPIDataType(first_entry.tensor), mpiOp,
                           mpi_context.GetMPICommunicator(Communicator::GLOBAL));
    if (op != MPI_SUCCESS) {
      throw std::runtime_error("MPI_Allreduce failed, see MPI output for details.");
    }
  }
""",
        "in one piece of 100 MB, half of it goes through memory that MPI has just been given and "
        "that is in no cache: four times as slow on one host; and above 2**31 elements their count "
        "did not fit",
    ),
    Edit(
        "horovod/common/mpi/mpi_controller.cc",
        '#include "mpi_controller.h"\n',
        f'#include "mpi_controller.h"\n\n{_PATIENTLY}',
        "who waits inside MPI for the other ranks keeps a core busy; this tests, and sleeps the "
        "longer between two tests the longer it has waited",
    ),
    Edit(
        "horovod/common/mpi/mpi_context.cc",
        """void MPIContextManager::EnvFinalize() {
  int is_mpi_finalized = 0;
  MPI_Finalized(&is_mpi_finalized);
  if (!is_mpi_finalized) {
    MPI_Finalize();
  }
}
""",
        """static void horovod_mpi_finalize() {
  int is_mpi_finalized = 0;
  MPI_Finalized(&is_mpi_finalized);
  if (!is_mpi_finalized) {
    MPI_Finalize();
  }
}

void MPIContextManager::EnvFinalize() {
  // Once finalized, MPI could not be initialized again.
  if (std::getenv("HOROVOD_MPI_NO_FINALIZE") == nullptr) {
    std::atexit(horovod_mpi_finalize);
  }
}
""",
        "hvd.shutdown and then hvd.init again, which Gloo allows, aborted; and who starts the "
        "ranks itself has no need of a last wait for each other",
    ),
    Edit(
        "horovod/common/mpi/mpi_context.cc",
        "    should_finalize = true;\n  }\n",
        """    should_finalize = true;
  }
  const char* expected = std::getenv("HOROVOD_MPI_WORLD_SIZE");
  int world_size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  if (expected != nullptr && world_size != std::atoi(expected)) {
    throw std::runtime_error(
        "MPI found " + std::to_string(world_size) + " rank(s) and the job has " + expected +
        ": MPI_Init did not reach what started this process. Each rank would train alone.");
  }
""",
        "an MPI that does not find its launcher (PMI_FD is not set, say) takes each process for "
        "the only one, without a word: hvd.size() is 1 on every rank, and each trains by itself. A "
        "run says how many ranks there are, and another number ends it",
    ),
    Edit(
        "horovod/common/operations.cc",
        "#include <atomic>\n",
        "#include <atomic>\n#include <condition_variable>\n#include <mutex>\n",
        "for what follows",
    ),
    Edit(
        "horovod/common/operations.cc",
        "bool RunLoopOnce(HorovodGlobalState& state) {\n",
        """// Never freed: a thread that still waits would keep the process from its exit.
static std::mutex& horovod_cycle_mutex = *new std::mutex;
static std::condition_variable& horovod_cycle = *new std::condition_variable;
static bool horovod_awaited = false;
static bool horovod_waiting = false;
static std::chrono::steady_clock::time_point horovod_awaited_since;

} // namespace

void HorovodAwaited() {
  std::lock_guard<std::mutex> lock(horovod_cycle_mutex);
  horovod_awaited = horovod_waiting = true;
  horovod_awaited_since = std::chrono::steady_clock::now();
  horovod_cycle.notify_one();
}

namespace {

void SleepUntilAwaited(HorovodGlobalState& state) {
  using namespace std::chrono;
  const microseconds cycle(std::max(1L, long(state.parameter_manager.CycleTimeMs() * 1000.)));
  // By the clock that all ranks of a host share: they look around together, and none waits.
  steady_clock::duration longest = cycle - system_clock::now().time_since_epoch() % cycle;
  bool pending = false;
  for (auto id : state.process_set_table.Ids()) {
    pending |= state.process_set_table.Get(id).tensor_queue.HasTensors();
  }
  std::unique_lock<std::mutex> lock(horovod_cycle_mutex);
  horovod_waiting = horovod_waiting && (pending || horovod_awaited);
  if (horovod_waiting) {
    const steady_clock::duration waited = steady_clock::now() - horovod_awaited_since;
    longest = std::min({longest, waited / 8, steady_clock::duration(milliseconds(1))});
  }
  horovod_cycle.wait_for(lock, longest, [] { return horovod_awaited; });
  horovod_awaited = false;
}

bool RunLoopOnce(HorovodGlobalState& state) {
""",
        "the background thread looked for work once in each cycle, a millisecond or more: whoever "
        "waits for a collective waited for that, too. Now he wakes it, and while what he waits for "
        "is on its way it looks again soon, the later the longer that takes. What nobody waits for "
        "yet waits for the cycle, which begins on all ranks at once",
    ),
    Edit(
        "horovod/common/operations.cc",
        "    std::this_thread::sleep_for(sleep_duration);\n  }\n  state.last_cycle_start",
        """    SleepUntilAwaited(state);
  }
  state.last_cycle_start""",
        "its sleep",
    ),
    Edit(
        "horovod/common/operations.cc",
        "    std::this_thread::sleep_for(std::chrono::milliseconds(1));\n",
        "    HorovodAwaited();\n    std::this_thread::sleep_for(std::chrono::milliseconds(1));\n",
        "for process sets",
    ),
    Edit(
        "horovod/common/operations.cc",
        "    horovod_global.shut_down = true;\n",
        "    horovod_global.shut_down = true;\n    HorovodAwaited();\n",
        "for hvd.shutdown",
    ),
    Edit(
        "horovod/common/tensor_queue.h",
        "  void RemoveJoinTensor();\n",
        """  void RemoveJoinTensor();

  bool HasTensors() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return !tensor_table_.empty();
  }
""",
        "whether anything is on its way",
    ),
    Edit(
        "horovod/common/operations.h",
        "namespace horovod {\nnamespace common {\n",
        "namespace horovod {\nnamespace common {\n\nvoid HorovodAwaited();\n",
        "for torch",
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "OP_REQUIRES_OK_ASYNC(context, ConvertStatus(enqueue_result), done);",
        "common::HorovodAwaited();\n"
        "    OP_REQUIRES_OK_ASYNC(context, ConvertStatus(enqueue_result), done);",
        "for TensorFlow, whose graph goes on as soon as an operation is done",
    ),
    Edit(
        "setup.py",
        "      install_requires=require_list,\n",
        "      install_requires=require_list + "
        f"list(filter(None, [os.environ.get('{REQUIRES}')])),\n",
        "a build against the mpich package needs that one",
    ),
    Edit(
        "horovod/common/basics.py",
        "global_process_set, _init_process_sets\n",
        "global_process_set, _init_process_sets, _setup as _setup_process_sets\n",
        "for what follows",
    ),
    Edit(
        "horovod/common/basics.py",
        "        try:\n            _init_process_sets(process_sets)\n",
        "        _setup_process_sets(self)\n"
        "        try:\n            _init_process_sets(process_sets)\n",
        "where horovod.torch and horovod.tensorflow are both imported, hvd.init of the first asked "
        "the second, which is not initialized, for the ranks of the global process set, took the "
        "error for a shutdown and went on: no rank was in that set, and DistributedOptimizer "
        "averaged nothing, without a word",
    ),
    Edit(
        "horovod/common/process_sets.py",
        "    global _basics\n    _basics = basics\n",
        """    global _basics
    if _basics is None or basics.is_initialized() or not _basics.is_initialized():
        _basics = basics
""",
        "importing horovod.tensorflow after hvd.init of horovod.torch, or the other way round, "
        "took the process sets away from the one that is in use",
    ),
    Edit(
        "horovod/torch/optimizer.py",
        "if p in self._handles and self._handles[p][0] is not None:\n",
        "if p in self._handles:\n",
        "its error for gradients computed too often, which is about to need no handle",
    ),
    Edit(
        "horovod/torch/optimizer.py",
        "        self._p_to_group = {}\n",
        "        self._p_to_group = {}\n        self._unsent_bytes = 0\n",
        "for what follows",
    ),
    Edit(
        "horovod/torch/optimizer.py",
        """                else:
                    handle, ctx = self._allreduce_grad_async(p)
            self._handles[p] = (handle, ctx)
""",
        """                elif p.is_cuda:
                    handle, ctx = self._allreduce_grad_async(p)
                else:
                    self._unsent_bytes += p.numel() * p.element_size()
            self._handles[p] = (handle, ctx)
            if self._unsent_bytes >= 1 << 22:
                self._unsent_bytes = 0
                for each, (handle, _) in list(self._handles.items()):
                    own = handle is None and not each.is_cuda
                    if own and self._allreduce_delay[each] == 0:
                        self._handles[each] = self._allreduce_grad_async(each)
""",
        "between two convolutions Python finds nothing of its own in the processor's caches: the "
        "call for a gradient took 80 microseconds there, and takes 25 right after another one. On "
        "CPUs gradients are sent by 4 MB, and what is left when the optimizer waits for them",
    ),
    Edit(
        "horovod/torch/optimizer.py",
        """            return

        completed = set()
""",
        """            return

        self._unsent_bytes = 0
        completed = set()
""",
        "the next backward pass begins anew",
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "int PollHandle(int handle) { return handle_manager.PollHandle(handle) ? 1 : 0; }\n",
        """int PollHandle(int handle) {
  const bool done = handle_manager.PollHandle(handle);
  if (!done) {
    common::HorovodAwaited();
  }
  return done ? 1 : 0;
}
""",
        "for hvd.poll",
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        """  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
""",
        """  {
    py::gil_scoped_release release_python_gil;
    if (!handle_manager.PollHandle(handle)) common::HorovodAwaited();
    handle_manager.WaitHandle(handle);
  }
""",
        "it polled without a pause: a core and the interpreter's lock for as long as a rank waits "
        "for the others, which looked like work, too",
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  bool PollHandle(int handle);\n",
        "  bool PollHandle(int handle);\n  void WaitHandle(int handle);\n",
        "what it calls instead",
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  std::mutex mutex_;\n",
        "  std::mutex mutex_;\n"
        "  // Never freed: a thread that still waits would keep the process from its exit.\n"
        "  std::condition_variable& done_ = *new std::condition_variable;\n",
        "what it waits for",
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "#include <atomic>\n",
        "#include <atomic>\n#include <condition_variable>\n",
        "its header",
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "  results_[handle] = std::make_shared<Status>(status);\n}\n",
        """  results_[handle] = std::make_shared<Status>(status);
  done_.notify_all();
}

void HandleManager::WaitHandle(int handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
}
""",
        "waits as the others wait for a lock",
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "  results_.clear();\n",
        "  results_.clear();\n  done_.notify_all();\n",
        "a handle that is gone is waited for no more",
    ),
)


def fetch(folder: Path) -> Path:
    """Download and unpack the source into ``folder``; returns its root.

    Raises:
        InstallError: the registry cannot be reached, or what came is not the release known here.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    command += ["--no-build-isolation", f"--dest={folder}", f"horovod=={VERSION}"]
    download = subprocess.run(command, capture_output=True, text=True, check=False)
    archive = folder / f"horovod-{VERSION}.tar.gz"
    if download.returncode or not archive.exists():
        lines = [line for line in download.stderr.splitlines() if "ERROR" in line]
        reason = lines[-1] if lines else f"pip exit code {download.returncode}"
        raise InstallError(
            f"Horovod {VERSION}'s source could not be downloaded: {reason}. "
            "Check the package index that pip is set up with."
        )
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise InstallError(
            f"the downloaded {archive.name} is not Horovod {VERSION}: its SHA-256 is {digest}, "
            f"not {SHA256}. Check the package index that pip is set up with."
        )
    # Debian 12's Python 3.11.2 knows no filters; the digest has said what is in the archive.
    safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **safely)  # noqa: S202 - see above
    return folder / f"horovod-{VERSION}"


def mend(root: Path) -> None:
    """Make the edits and lay our own files over the source.

    Raises:
        InstallError: a file lacks the text that an edit replaces.
    """
    for edit in EDITS:
        file = root / edit.path
        text = file.read_text()
        if edit.old not in text:
            raise InstallError(
                f"{edit.path} of Horovod {VERSION} lacks the text to mend: {edit.old}"
            )
        file.write_text(text.replace(edit.old, edit.new))
    shutil.copytree(OVERLAY, root, dirs_exist_ok=True)


def digest() -> str:
    """Eight hexadecimal digits that change with any edit and any file laid over the source."""
    texts = [repr(EDITS)]
    texts += [file.read_text() for file in sorted(OVERLAY.rglob("*")) if file.is_file()]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8]
