// Functions of the module mpi_lib_v2 for horovod_runner.torch_backend.

#ifndef HOROVOD_TORCH_PROCESS_GROUP_H
#define HOROVOD_TORCH_PROCESS_GROUP_H

#include <torch/csrc/utils/pybind.h>

namespace horovod {
namespace torch {

// Without MPI it defines nothing.
void DefineProcessGroup(pybind11::module_& module);

} // namespace torch
} // namespace horovod

#endif // HOROVOD_TORCH_PROCESS_GROUP_H
