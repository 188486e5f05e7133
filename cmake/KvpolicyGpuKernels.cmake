# SPDX-License-Identifier: Apache-2.0
#
# The kernels of our own CUDA programs, compiled once for all of them (kvpolicy/cuda/instances.hpp): a library
# kvpolicy_gpu_<element>_<head_dim> for each set that some program uses, in objects that a build compiles side by side.
set(KVPOLICY_GPU_KERNEL_SETS float16_64 bfloat16_64 bfloat16_128)

# kvpolicy_gpu_object(<list> <name> <macro call>): one source file that makes the call.
function(kvpolicy_gpu_object list name call)
  set(file "${PROJECT_BINARY_DIR}/gpu_kernels/${name}.cu")
  file(CONFIGURE OUTPUT "${file}" CONTENT "#include <kvpolicy/cuda/instances.hpp>\n\n${call}\n" @ONLY)
  set(${list} ${${list}} "${file}" PARENT_SCOPE)
endfunction()

set(sources)
kvpolicy_gpu_object(sources common "KVPOLICY_DEFINE_COMMON_KERNELS()")
add_library(kvpolicy_gpu_common STATIC EXCLUDE_FROM_ALL ${sources})
target_link_libraries(kvpolicy_gpu_common PUBLIC kvpolicy::cuda)
target_compile_definitions(kvpolicy_gpu_common INTERFACE KVPOLICY_SEPARATE_KERNELS)

foreach(name IN LISTS KVPOLICY_GPU_KERNEL_SETS)
  string(REGEX MATCH "^(.*)_([0-9]+)$" _ "${name}")
  set(of "kvpolicy::${CMAKE_MATCH_1}, ${CMAKE_MATCH_2}")
  set(sources)
  kvpolicy_gpu_object(sources ${name}_rows "KVPOLICY_DEFINE_ROW_KERNELS(${of})")
  kvpolicy_gpu_object(sources ${name}_exact "KVPOLICY_DEFINE_EXACT_KERNELS(${of})")
  kvpolicy_gpu_object(sources ${name}_packed_decode_8 "KVPOLICY_DEFINE_PACKED_DECODE(${of}, 1)")
  kvpolicy_gpu_object(sources ${name}_packed_decode_16 "KVPOLICY_DEFINE_PACKED_DECODE(${of}, 2)")
  kvpolicy_gpu_object(sources ${name}_packed_prefill "KVPOLICY_DEFINE_PACKED_PREFILL(${of})")
  kvpolicy_gpu_object(sources ${name}_packed_observe "KVPOLICY_DEFINE_PACKED_OBSERVE(${of})")
  kvpolicy_gpu_object(sources ${name}_bound "KVPOLICY_DEFINE_BOUND_KERNELS(${of})")
  add_library(kvpolicy_gpu_${name} STATIC EXCLUDE_FROM_ALL ${sources})
  target_link_libraries(kvpolicy_gpu_${name} PUBLIC kvpolicy_gpu_common)
endforeach()

# For the tests of decode, which run it over quantised rows of these as well.
set(sources)
kvpolicy_gpu_object(sources float16_128_packed_decode_8 "KVPOLICY_DEFINE_PACKED_DECODE(kvpolicy::float16, 128, 1)")
kvpolicy_gpu_object(sources float16_128_packed_decode_16 "KVPOLICY_DEFINE_PACKED_DECODE(kvpolicy::float16, 128, 2)")
add_library(kvpolicy_gpu_float16_128_decode STATIC EXCLUDE_FROM_ALL ${sources})
target_link_libraries(kvpolicy_gpu_float16_128_decode PUBLIC kvpolicy_gpu_common)
