# Describes the installed PyTorch, from one import of it: two seconds, and Horovod's own module of
# this name imports it eight times. With HOROVOD_RUNNER_CPU=1 a CUDA or ROCm build of PyTorch counts
# as one for CPUs.
#
# Sets PYTORCH_FOUND, and Pytorch_ followed by VERSION, CUDA and ROCM (TRUE or FALSE), CXX11 (the C++
# ABI, TRUE or FALSE), INCLUDE_DIRS, LIBRARY_DIRS, LIBRARIES and COMPILE_FLAGS.

list(APPEND CMAKE_PREFIX_PATH ${Pytorch_ROOT})
set(_describe [[
import os
import sys

stdout, sys.stdout = sys.stdout, open(os.devnull, "w")
import torch
from torch.utils import cpp_extension

gpu = os.environ.get("HOROVOD_RUNNER_CPU") != "1"
cuda = gpu and torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
rocm = gpu and torch.version.hip is not None and cpp_extension.ROCM_HOME is not None
kind = cpp_extension.CUDAExtension if cuda or rocm else cpp_extension.CppExtension
extension = kind("", [])
for value in (
    torch.__version__,
    str(cuda).upper(),
    str(rocm).upper(),
    str(torch.compiled_with_cxx11_abi()).upper(),
    ",".join(extension.include_dirs),
    ",".join(extension.library_dirs),
    ",".join(extension.libraries),
    " ".join(cpp_extension.COMMON_HIPCC_FLAGS) if rocm else "",
):
    print(f"={value}", file=stdout)  # never an empty element of a list
]])
execute_process(COMMAND ${PY_EXE} -c "${_describe}"
                OUTPUT_VARIABLE _description OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REPLACE "\n" ";" _description "${_description}")
if(_description)
    foreach(_name VERSION CUDA ROCM CXX11 INCLUDE_DIRS LIBRARY_DIRS _names COMPILE_FLAGS)
        list(GET _description 0 _value)
        list(REMOVE_AT _description 0)
        string(SUBSTRING "${_value}" 1 -1 _value)
        string(REPLACE "," ";" Pytorch_${_name} "${_value}")
    endforeach()
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Pytorch REQUIRED_VARS Pytorch_VERSION VERSION_VAR Pytorch_VERSION)
if(NOT PYTORCH_FOUND)
    return()
endif()

foreach(_name IN LISTS Pytorch__names)
    find_library(FOUND_LIB_${_name} NAMES ${_name} HINTS ${Pytorch_LIBRARY_DIRS})
    list(APPEND Pytorch_LIBRARIES ${FOUND_LIB_${_name}})
endforeach()
if(Pytorch_CXX11)
    string(APPEND Pytorch_COMPILE_FLAGS " -D_GLIBCXX_USE_CXX11_ABI=1")
else()
    string(APPEND Pytorch_COMPILE_FLAGS " -D_GLIBCXX_USE_CXX11_ABI=0")
endif()
